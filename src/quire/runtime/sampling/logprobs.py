"""Raw log-probabilities: the log-softmax of the model's logits before any transform, as is vLLM's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native import ops
from quire.kernels.native.loader import why_not_native
from quire.runtime.sampling.ranking import top_logits
from quire.runtime.sampling.tiles import tile_max, tile_sum
from quire.types.step import TokenLogprobs

_Kind = TypeVar("_Kind", bound=np.generic)
_LINES_AT_ONCE = 64  # positions per pass: bounds the scratch memory of a long prompt


class Listing(NamedTuple):
    """Log-probabilities at T positions, on the device or on the host."""

    token_ids: Tensor  # [T] int64: the chosen tokens; negative: none
    chosen: Tensor  # [T] float32: their log-probabilities
    rank: Tensor  # [T] int: 1 + number of tokens with a higher logit
    top_ids: Tensor  # [T, k] int: the most probable tokens, best first
    top_logprobs: Tensor  # [T, k] float32
    named_ids: Tensor  # [T, m] int: tokens requested by id, padded
    named_logprobs: Tensor  # [T, m] float32


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many most probable tokens (-1: all) and how many named tokens the entry of each position contains."""

    top: Sequence[int]
    named: Sequence[int]

    def most(self, vocab_size: int) -> int:
        """Return how many most probable tokens a listing needs to serve all positions."""
        return max(_count(count, vocab_size) for count in self.top)


def list_logprobs(logits: Tensor, chosen: Tensor, count: int, named: Tensor) -> Listing:
    """List the logprobs of logits [T, vocab]: of the tokens `chosen` [T], the `count` most probable, and the `named`
    [T, m]. Does not wait for the device."""
    parts = []
    for start in range(0, len(chosen), _LINES_AT_ONCE):
        lines = slice(start, start + _LINES_AT_ONCE)
        parts.append(_listed(logits[lines].float(), chosen[lines], count, named[lines]))
    return parts[0] if len(parts) == 1 else Listing._make(map(torch.cat, zip(*parts, strict=True)))


def entries_of(listing: Listing, wanted: Wanted, vocab_size: int) -> list[TokenLogprobs]:
    """Return an entry per position of a listing on the host, with the wanted tokens. Copies what it takes."""
    token_ids, chosen, rank, top_ids, top_logprobs, named_ids, named_logprobs = (part.numpy() for part in listing)
    ids = np.concatenate([token_ids[:, None], top_ids, named_ids], axis=1, dtype=np.int32)
    logprobs = np.concatenate([chosen[:, None], top_logprobs, named_logprobs], axis=1)
    start = 1 + top_ids.shape[1]  # the first column of named tokens
    return [
        TokenLogprobs(_joined(ids[i], top, start, named), _joined(logprobs[i], top, start, named), int(rank[i]))
        for i, (top, named) in enumerate(
            zip((_count(count, vocab_size) for count in wanted.top), wanted.named, strict=True)
        )
    ]


def _listed(logits: Tensor, token_ids: Tensor, count: int, named: Tensor) -> Listing:
    own = logits.gather(1, token_ids.clamp(min=0)[:, None])  # [T, 1]
    tops = tile_max(logits)
    better = torch.gt(logits, own, out=torch.empty_like(logits))  # 1 or 0: floats are faster than a mask on CPUs
    rank = better.sum(dim=-1).long() + 1
    if count:
        top, top_ids = top_logits(logits, tops, count)
    else:
        top, top_ids = own[:, :0], token_ids.new_empty(len(token_ids), 0)
    best = tops.amax(dim=-1, keepdim=True)
    shift = _log_sum_exp(logits, best)
    return Listing(
        token_ids, (own - shift).squeeze(1), rank, top_ids, top - shift, named, logits.gather(1, named) - shift
    )


def _log_sum_exp(logits: Tensor, best: Tensor) -> Tensor:  # [T, vocab], [T, 1] -> [T, 1]
    """Log-sum-exp per row. On CPUs a row's result does not depend on the other rows: torch would split the sum of a
    single row over threads."""
    if why_not_native(logits.dtype, logits.device) is None and logits.is_contiguous():
        return ops.log_sum_exp(logits, best.contiguous())
    weights = (logits - best).exp_()
    total = tile_sum(weights).sum(dim=-1, keepdim=True) if logits.device.type == "cpu" else weights.sum(-1, True)
    return best + total.log_().float()


def _count(count: int, vocab_size: int) -> int:
    return vocab_size if count == -1 else min(count, vocab_size)


def _joined(line: npt.NDArray[_Kind], num_best: int, start: int, num_named: int) -> npt.NDArray[_Kind]:
    """Return the columns of the chosen token, the most probable tokens, and the named ones, which begin at `start`."""
    own = line[: 1 + num_best]
    return np.concatenate([own, line[start : start + num_named]]) if num_named else own.copy()
