"""A gated delta net by its definition, in float64 and token by token, and steps to compare kernels with it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.delta import DeltaWeights
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes

NUM_SLOTS = 8
# Rows of one token in place, from nothing and to another slot; then chunks: whole, and cut where the state moves.
SEGMENTS = [
    (0, 1, 3, 3),
    (1, 1, -1, 5),
    (2, 1, 7, 4),
    (3, 40, -1, 0),
    (43, 1, 2, 2),
    (44, 1, SAME_RUN, 6),
    (45, 70, SAME_RUN, 1),
    (0, 0, -1, -1),
]
NUM_TOKENS = 115


@dataclass
class DeltaCase:
    sizes: RecurrentSizes
    weights: DeltaWeights
    qkvz: Tensor  # [tokens, channels + value size]
    gates: Tensor  # [tokens, 2 * value heads]
    state: Tensor  # [slots, numbers], strided as in a cache
    segments: npt.NDArray[np.int64]


def delta_case(
    sizes: RecurrentSizes,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    *,
    alike: bool = False,
    most: float = 1.0,
) -> DeltaCase:
    """`alike`: all tokens are the same, so that each changes what the one before has written. `most`: the largest
    strength."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = DeltaWeights(
        (rand(sizes.width, sizes.channels) * 0.5).to(device),
        (-rand(sizes.value_heads).abs() * (0.01 if alike else 1.0)).to(device),
        rand(sizes.value_heads).to(device),
        (1.0 + 0.2 * rand(sizes.value_dim)).to(device),
        1e-6,
        most,
    )
    qkvz, gates = rand(NUM_TOKENS, sizes.channels + sizes.value_size), rand(NUM_TOKENS, 2 * sizes.value_heads)
    if alike:
        qkvz[:], gates[:] = qkvz[:1].clone(), gates[:1].abs() + 2.0
    state = (rand(NUM_SLOTS, sizes.state_numbers + 48) * 0.3).to(device)[:, 16:-16]
    segments = np.array(SEGMENTS, dtype=np.int64)
    return DeltaCase(sizes, weights, qkvz.to(dtype).to(device), gates.to(dtype).to(device), state, segments)


def expected(case: DeltaCase) -> tuple[Tensor, Tensor]:
    """What tokens give [tokens, value size], and the states [slots, numbers] afterwards; float64, on the CPU."""
    sizes, weights = case.sizes, [weight.double().cpu() for weight in case.weights[:4]]
    qkvz, gates, before = case.qkvz.double().cpu(), case.gates.double().cpu(), case.state.double().cpu()
    after, out = before.clone(), torch.zeros(NUM_TOKENS, sizes.value_size, dtype=torch.float64)
    state = before[0]
    for first, count, read, written in case.segments.tolist():
        if written < 0:
            continue
        if read != SAME_RUN:
            state = before[read].clone() if read >= 0 else torch.zeros_like(before[0])
        for token in range(first, first + count):
            out[token], state = _token(qkvz[token], gates[token], weights, state, sizes, case.weights.most)
        after[written, : sizes.state_numbers] = state[: sizes.state_numbers]
    return out, after


def _token(
    qkvz: Tensor, gates: Tensor, weights: list[Tensor], state: Tensor, sizes: RecurrentSizes, most: float
) -> tuple[Tensor, Tensor]:
    convolution, rate, bias, norm = weights
    tail = state[sizes.matrix_numbers : sizes.state_numbers].view(sizes.width - 1, sizes.channels)
    inputs = torch.cat((tail, qkvz[None, : sizes.channels]))
    mixed, z = F.silu((inputs * convolution).sum(dim=0)), qkvz[sizes.channels :].view(sizes.value_heads, -1)
    query, key = (mixed[at * sizes.key_size :][: sizes.key_size].view(sizes.key_heads, -1) for at in (0, 1))
    value = mixed[2 * sizes.key_size :].view(sizes.value_heads, -1)
    matrices = state[: sizes.matrix_numbers].view(sizes.value_heads, sizes.key_dim, sizes.value_dim).clone()
    strength, pace = gates.view(2, -1)
    decay = (rate * F.softplus(pace + bias)).exp()
    read = []
    for head in range(sizes.value_heads):
        group = head // (sizes.value_heads // sizes.key_heads)
        q, k = (each[group] / (each[group].square().sum() + 1e-6).sqrt() for each in (query, key))
        matrix = matrices[head] * decay[head]
        matrix = matrix + torch.outer(k, most * strength[head].sigmoid() * (value[head] - matrix.T @ k))
        matrices[head] = matrix
        given = matrix.T @ q / sizes.key_dim**0.5
        read.append(given / (given.square().mean() + 1e-6).sqrt() * norm * F.silu(z[head]))
    rest = state[sizes.state_numbers :]
    return torch.cat(read), torch.cat((matrices.flatten(), inputs[1:].flatten(), rest))
