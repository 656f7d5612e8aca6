"""Gated delta nets in plain torch: sequences with one token are batched, longer runs are computed one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.delta import DeltaWeights
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import Segment, find_runs, single_tokens

CHUNK = 64  # tokens of a long run that are computed together
LONG = 16  # runs of fewer tokens are computed token by token
_first_solve, _has_solved = threading.Lock(), threading.Event()


def gated_delta(
    mixed: Tensor,  # [tokens, channels]: queries, keys and values after the convolution
    z: Tensor,  # [tokens, value size]: the gate
    ba: Tensor,  # logits of the strength, then the inputs of the decay
    weights: DeltaWeights,
    state: Tensor,  # [slots, elements] float32
    segments: Sequence[Segment],
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, value size]
    """Return the output of each token, RMS-normed per head and multiplied by silu of its gate `z`. Updates `state`."""
    tokens, matrices = len(mixed), matrices_of(state, sizes)
    query, key, value = torch.split(mixed.float(), [sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
    shared = sizes.value_heads // sizes.key_heads
    query, key = (_unit(each, sizes).repeat_interleave(shared, dim=1) for each in (query, key))
    query, value = query * sizes.key_dim**-0.5, value.view(tokens, sizes.value_heads, -1)
    strength, pace = ba.float().chunk(2, dim=1)
    strength, decay = (
        weights.most * strength.sigmoid(),
        weights.rate * F.softplus(pace + weights.bias),
    )  # [tokens, heads]
    read = torch.zeros(tokens, sizes.value_heads, sizes.value_dim, device=mixed.device)
    runs = find_runs(segments)
    singles = single_tokens(runs, mixed.device)
    if singles is not None:
        one, before, after, is_set = singles
        (read[one],), matrices[after] = by_tokens(
            query[None, one], key[None, one], value[None, one], decay[None, one], strength[None, one],
            matrices[before].masked_fill_(~is_set.view(-1, 1, 1, 1), 0.0),
        )  # fmt: skip
    for run in (run for run in runs if len(run) > 1 or run[0][1] > 1):
        matrix = torch.zeros_like(matrices[0]) if run[0][2] < 0 else matrices[run[0][2]].clone()
        for first, count, _, slot in run:
            mine = slice(first, first + count)
            rule = by_chunks if count >= LONG else by_tokens
            read[mine], matrix = rule(query[mine], key[mine], value[mine], decay[mine], strength[mine], matrix)
            matrices[slot] = matrix
    normal = F.rms_norm(read, read.shape[-1:], weights.norm, weights.eps)
    return (normal.flatten(1) * F.silu(z.float())).to(mixed.dtype)


def by_tokens(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule token by token. query, key [tokens, ..., heads, key dim], value [tokens, ..., heads, value
    dim], decay (its logarithm) and strength [tokens, ..., heads], matrix [..., heads, key dim, value dim]. Returns the
    outputs of the tokens and the matrix after the last one."""
    read, faded = torch.empty_like(value), decay.exp()
    for token in range(len(query)):
        matrix = matrix * faded[token, ..., None, None]
        known = torch.einsum("...kv,...k->...v", matrix, key[token])
        change = (value[token] - known) * strength[token, ..., None]
        matrix = matrix + key[token, ..., None] * change[..., None, :]
        read[token] = torch.einsum("...kv,...k->...v", matrix, query[token])
    return read, matrix


def by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `by_tokens`, CHUNK tokens at a time: the updates of a chunk solve a triangular system."""
    read = torch.empty_like(value)
    for begin in range(0, len(query), CHUNK):
        mine = slice(begin, begin + CHUNK)
        some, matrix = _chunk(
            query[mine].transpose(0, 1), key[mine].transpose(0, 1), value[mine].transpose(0, 1), decay[mine].T,
            strength[mine].T, matrix,
        )  # fmt: skip
        read[mine] = some.transpose(0, 1)
    return read, matrix


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk. query, key, value [heads, tokens, dim]; decay, strength [heads, tokens]."""
    total = decay.cumsum(dim=1)  # log decay since the start of the chunk
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, to, from]
    strong = key * strength[..., None]
    system = (strong @ key.mT) * between
    wanted = value * strength[..., None] - (strong * total.exp()[..., None]) @ matrix
    change = _solve(system, wanted)
    read = (query * total.exp()[..., None]) @ matrix + ((query @ key.mT) * between) @ change
    last = total[:, -1:]
    matrix = matrix * last.exp()[..., None] + (key * (last - total).exp()[..., None]).mT @ change
    return read, matrix


def _solve(system: Tensor, wanted: Tensor) -> Tensor:
    """Solve a lower triangular system whose diagonal is taken to be ones. On a GPU the first solve of the process runs
    alone: torch loads a library in it, and fails if another thread needs the library meanwhile."""
    if not wanted.is_cuda or _has_solved.is_set():
        found: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        return found
    with _first_solve:
        found = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        _has_solved.set()
    return found


def _unit(x: Tensor, sizes: RecurrentSizes) -> Tensor:  # [tokens, key heads, key dim]
    x = x.view(len(x), sizes.key_heads, sizes.key_dim)
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def matrices_of(state: Tensor, sizes: RecurrentSizes) -> Tensor:  # [slots, value heads, key dim, value dim]
    matrices = state[:, : sizes.matrix_numbers]
    return matrices.view(len(state), sizes.value_heads, sizes.key_dim, sizes.value_dim)
