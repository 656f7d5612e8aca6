"""Raw log-probabilities: log-softmax of the model's logits before any transform, as is vLLM's default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.sampling.ranking import head
from quire.runtime.sampling.tiles import tile_max
from quire.types.step import TokenLogprobs

_Kind = TypeVar("_Kind", bound=np.generic)
_LINES_AT_ONCE = 64  # bounds the scratch memory of a long prompt to this many times the vocabulary


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Tokens that requests asked for by id: the first `counts[i]` of line i; the rest of it is padding."""

    ids: Tensor  # [T, width] int64
    counts: list[int]

    def lines(self, part: slice) -> NamedTokens:
        return NamedTokens(self.ids[part], self.counts[part])


def token_logprobs(
    logits: Tensor, chosen: Tensor, counts: list[int], named: NamedTokens | None = None
) -> list[TokenLogprobs]:
    """An entry per line of logits [T, vocab]: token `chosen` [T], the `counts` most likely ones (-1: all), the named.

    Waits for the device.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(counts), _LINES_AT_ONCE):
        lines = slice(start, start + _LINES_AT_ONCE)
        part = None if named is None else named.lines(lines)
        entries += _entries(logits[lines].float(), chosen[lines], counts[lines], part)
    return entries


def _entries(logits: Tensor, chosen: Tensor, counts: list[int], named: NamedTokens | None) -> list[TokenLogprobs]:
    vocab_size = logits.shape[1]
    wanted = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    own = logits.gather(1, chosen[:, None])  # [T, 1]
    tops = tile_max(logits)
    better = torch.gt(logits, own, out=torch.empty_like(logits))  # 1 or 0: floats are faster than a mask on CPUs
    ranks = (better.sum(dim=-1).long() + 1).cpu().numpy()
    values, ids = own, chosen[:, None]
    if max(wanted):
        best_values, best_ids = head(logits, tops, max(wanted))
        values, ids = torch.cat([values, best_values], dim=1), torch.cat([ids, best_ids], dim=1)
    if named is not None:
        values, ids = torch.cat([values, logits.gather(1, named.ids)], dim=1), torch.cat([ids, named.ids], dim=1)
    best = tops.amax(dim=-1, keepdim=True)
    log_total = (logits - best).exp_().sum(dim=-1, keepdim=True).log_()
    host_logprobs = (values - best - log_total).cpu().numpy()
    host_ids = ids.to(torch.int32).cpu().numpy()
    named_counts = [0] * len(wanted) if named is None else named.counts
    start = 1 + max(wanted)  # of the named ones
    return [
        TokenLogprobs(_joined(host_ids[i], k, start, m), _joined(host_logprobs[i], k, start, m), int(ranks[i]))
        for i, (k, m) in enumerate(zip(wanted, named_counts, strict=True))
    ]


def _joined(line: npt.NDArray[_Kind], num_best: int, start: int, num_named: int) -> npt.NDArray[_Kind]:
    """The chosen token's column, the most likely ones', and the named ones', which begin at `start`."""
    own = line[: 1 + num_best]
    return np.concatenate([own, line[start : start + num_named]]) if num_named else own.copy()
