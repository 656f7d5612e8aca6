"""Raw log-probabilities: log-softmax of the model's logits before any transform, as is vLLM's default."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.ranking import head
from quire.runtime.sampling.tiles import tile_max
from quire.types.step import TokenLogprobs

_LINES_AT_ONCE = 64  # bounds the scratch memory of a long prompt to this many times the vocabulary


def token_logprobs(logits: Tensor, chosen: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """An entry per line of logits [T, vocab]: token `chosen` [T], then the `counts` most likely ones (-1: all).

    Waits for the device.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(counts), _LINES_AT_ONCE):
        lines = slice(start, start + _LINES_AT_ONCE)
        entries += _entries(logits[lines].float(), chosen[lines], counts[lines])
    return entries


def _entries(logits: Tensor, chosen: Tensor, counts: list[int]) -> list[TokenLogprobs]:
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
    best = tops.amax(dim=-1, keepdim=True)
    log_total = (logits - best).exp_().sum(dim=-1, keepdim=True).log_()
    host_logprobs = (values - best - log_total).cpu().numpy()
    host_ids = ids.to(torch.int32).cpu().numpy()
    return [
        TokenLogprobs(np.array(host_ids[i, : 1 + k]), np.array(host_logprobs[i, : 1 + k]), int(ranks[i]))
        for i, k in enumerate(wanted)
    ]
