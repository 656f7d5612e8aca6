"""Mamba-2 in plain torch: rows with one token are computed together, longer runs one by one, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.mamba import GatedNorm, MambaWeights
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import Segment, find_runs, single_tokens
from quire.kernels.reference.delta import matrices_of

CHUNK = 64  # tokens of a run that are computed together


def scan(
    mixed: Tensor,  # [tokens, channels]: x, B and C after the convolution
    pace: Tensor,  # [tokens, heads]
    weights: MambaWeights,
    state: Tensor,  # [slots, elements] float32
    segments: Sequence[Segment],
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, heads * head dim] float32
    """Return the output of each token, without gate and norm. Updates `state`."""
    tokens, heads, groups = len(mixed), sizes.value_heads, sizes.key_heads
    x, key, query = torch.split(mixed.float(), [sizes.value_size, sizes.key_size, sizes.key_size], dim=1)
    x, key, query = x.view(tokens, heads, -1), key.view(tokens, groups, -1), query.view(tokens, groups, -1)
    step = F.softplus(pace.float() + weights.bias)
    value, decay = x * step[..., None], step * weights.rate
    read, matrices, runs = torch.zeros_like(x), matrices_of(state, sizes), find_runs(segments)
    singles = single_tokens(runs, mixed.device)
    if singles is not None:
        one, before, after, is_set = singles
        keys, queries = (each[one].repeat_interleave(heads // groups, dim=1) for each in (key, query))
        matrix = matrices[before].masked_fill_(~is_set.view(-1, 1, 1, 1), 0.0) * decay[one].exp()[..., None, None]
        matrix += keys[..., None] * value[one][..., None, :]
        matrices[after], read[one] = matrix, (queries[..., None, :] @ matrix).squeeze(2)
    for run in (run for run in runs if len(run) > 1 or run[0][1] > 1):
        matrix = torch.zeros_like(matrices[0]) if run[0][2] < 0 else matrices[run[0][2]].clone()
        for first, count, _, slot in run:
            for begin in range(first, first + count, CHUNK):
                mine = slice(begin, min(begin + CHUNK, first + count))
                read[mine], matrix = _chunk(query[mine], key[mine], value[mine], decay[mine], matrix)
            matrices[slot] = matrix
    return torch.addcmul(read, x, weights.skip[:, None]).flatten(1)


def _chunk(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk. query, key [tokens, groups, state size], value [tokens, heads, dim], decay (its logarithm)
    [tokens, heads], matrix [heads, state size, dim]. Returns outputs and the updated matrix."""
    groups, shape = query.shape[1], matrix.shape
    query, key = query.transpose(0, 1), key.transpose(0, 1)  # [groups, tokens, state size]
    value = value.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [groups, heads of each, tokens, dim]
    total = decay.cumsum(dim=0).unflatten(1, (groups, -1)).permute(1, 2, 0)  # log decay since the start of the chunk
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # [groups, heads of each, to, from]
    matrix, last = matrix.unflatten(0, (groups, -1)), total[..., -1:]
    read = (query[:, None] * total.exp()[..., None]) @ matrix + ((query @ key.mT)[:, None] * between) @ value
    left = key[:, None] * (last - total).exp()[..., None]
    matrix = matrix * last.exp()[..., None] + left.mT @ value
    return read.permute(2, 0, 1, 3).flatten(1, 2), matrix.reshape(shape)


def gate_and_norm(
    read: Tensor,  # [tokens, size] float32
    z: Tensor,  # [tokens, size]
    weight: Tensor,  # [size] float32
    norm: GatedNorm,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # [tokens, size], of z's dtype
    """Multiply outputs by silu of their gates z and by `weight`, RMS-normed in groups before or after.

    `total` returns the sums of squares [tokens, 1] of the whole group if these columns are only a part of it."""
    gate = F.silu(z.float())
    gated = read if norm.norm_first else read * gate
    if norm.group is not None:
        by_group = gated.unflatten(1, (-1, norm.group)) if total is None else gated[:, None]
        squares = by_group.square().sum(dim=-1) if total is None else total(gated)
        gated = (by_group * (squares / norm.group + norm.eps).rsqrt()[..., None]).flatten(1)
    return ((gated * gate if norm.norm_first else gated) * weight).to(z.dtype)
