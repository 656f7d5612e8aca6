"""The scan of RG-LRU layers in plain torch: rows with one token are computed together, longer runs by parallel prefix
sums over pieces of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import Segment, find_runs, single_tokens
from quire.kernels.rglru import RgLruWeights

_PIECE = 256  # tokens of a run that are scanned at once


def gates_of(mixed: Tensor, weights: RgLruWeights) -> Tensor:
    """Return the logits of both gates [blocks, tokens, 2 * size] of the inputs [tokens, channels]."""
    by_block = mixed.view(len(mixed), len(weights.gates), -1).transpose(0, 1)
    return torch.baddbmm(weights.gates_bias, by_block, weights.gates)


def scan(
    mixed: Tensor,  # [tokens, channels]: inputs after the convolution
    gates: Tensor,  # [blocks, tokens, 2 * size], see `gates_of`
    side: Tensor,  # [tokens, channels]
    weights: RgLruWeights,
    state: Tensor,  # [slots, elements] float32
    segments: Sequence[Segment],
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, channels], of mixed's dtype
    """Return the output of each token. Updates `state`."""
    into, keeps = (part.transpose(0, 1).flatten(1) for part in gates.float().chunk(2, dim=2))
    log_keep = weights.rate * torch.sigmoid(keeps)
    gated, read = mixed.float() * torch.sigmoid(into), torch.zeros_like(log_keep)
    change, keep = gated * torch.sqrt(-torch.expm1(2.0 * log_keep)), log_keep.exp()
    numbers, runs = state[:, : sizes.channels], find_runs(segments)
    singles = single_tokens(runs, mixed.device)
    if singles is not None:
        one, before, after, is_set = singles
        known = is_set.view(-1, 1)
        found = torch.where(known, keep[one] * numbers[before] + change[one], gated[one])
        read[one], numbers[after] = found, found
    for run in (run for run in runs if len(run) > 1 or run[0][1] > 1):
        begin, end = run[0][0], run[-1][0] + run[-1][1]
        if run[0][2] < 0:
            change[begin], keep[begin] = gated[begin], 0.0
        carried = torch.zeros_like(numbers[0]) if run[0][2] < 0 else numbers[run[0][2]]
        for first in range(begin, end, _PIECE):
            piece = slice(first, min(first + _PIECE, end))
            change[first] += keep[first] * carried
            read[piece] = _prefix_sums(keep[piece], change[piece])
            carried = read[piece.stop - 1]
        for first, count, _, slot in run:
            numbers[slot] = read[first + count - 1]
    return read.to(mixed.dtype) * F.gelu(side, approximate="tanh")


def _prefix_sums(keep: Tensor, change: Tensor) -> Tensor:  # [tokens, channels] each
    """Return all h with h[t] = keep[t] * h[t - 1] + change[t], where h before the first token is zero."""
    keep, found, distance = keep.clone(), change.clone(), 1
    while distance < len(found):
        found[distance:] = torch.addcmul(found[distance:], keep[distance:], found[:-distance])
        keep[distance:] = keep[distance:] * keep[:-distance]
        distance *= 2
    return found
