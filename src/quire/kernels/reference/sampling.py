"""Sampling of one row by a full sort, in plain torch and integer arithmetic: the reference for the sampling kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NOT_FINITE = -1
NOTHING_ALLOWED = -2
_MASK = 2**64 - 1


class Parameters(NamedTuple):
    """The sampling parameters of a row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stream: int = 0  # initial state of the row's random stream


def uniform(stream: int, num_outputs: int) -> float:
    """Return SplitMix64's value in (0, 1) for the token after `num_outputs` generated ones."""
    state = (stream + (num_outputs + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((state ^ (state >> 31)) >> 12) + 0.5) * 2.0**-52


def sample(logits: Tensor, how: Parameters, num_outputs: int) -> int:  # [vocab]
    """Sample a token from logits [vocab] by temperature, min_p, top_k and top_p, in this order. Returns a negative code
    (NOT_FINITE or NOTHING_ALLOWED) if no token can be chosen."""
    x, vocab_size = logits.float(), len(logits)
    best = x.max()  # NaN if any logit is NaN
    if not best.isfinite():
        return NOTHING_ALLOWED if best == float("-inf") else NOT_FINITE
    if how.temperature == 0.0:
        return int(x.argmax())
    x = x / max(how.temperature, 1e-20)
    best = x.max()
    if how.min_p > 0.0:
        cut = best + torch.tensor(math.log(how.min_p), dtype=torch.float32, device=x.device)
        x = torch.where(x >= cut, x, float("-inf"))
    weights = ((x - best).exp() * 2.0 ** (53 - (vocab_size - 1).bit_length())).floor().long()
    limited = 0 < how.top_k < vocab_size
    order = torch.arange(vocab_size, device=x.device)
    if limited or how.top_p < 1.0:
        order = torch.sort(x if limited else weights, descending=True, stable=True).indices
    if limited:
        order = order[: how.top_k]
    cumulative = weights[order].cumsum(0)
    if how.top_p < 1.0:
        needed = math.ceil(float(cumulative[-1]) * how.top_p)
        cumulative = cumulative[: int((cumulative < needed).sum()) + 1]
    total = int(cumulative[-1])
    share = min(math.floor(uniform(how.stream, num_outputs) * total), total - 1)
    return int(order[int((cumulative <= share).sum())])


def penalize(logits: Tensor, tokens: list[int], num_prompt: int, penalties: tuple[float, float, float]) -> Tensor:
    """Return logits [vocab] as float32 after repetition, presence and frequency penalties for a row's tokens."""
    repetition, presence, frequency = penalties
    out = logits.float().clone()
    for token in set(tokens):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(tokens[num_prompt:]):
        out[token] -= presence
    for token in tokens[num_prompt:]:
        out[token] -= frequency
    return out


def logprobs(logits: Tensor, token_ids: Tensor, listed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For logits [entries, vocab], return the logprob and rank of each token id [entries], and the ids and logprobs of
    the `listed` most likely tokens."""
    every = logits.float().log_softmax(dim=-1)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :listed]
    return every.gather(1, token_ids[:, None]).squeeze(1), ranks, ids, every.gather(1, ids)
