"""A Mamba layer by its definition, in float64 and token by token, and steps to compare kernels with it on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_cases import NUM_SLOTS, NUM_TOKENS
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes
from quire.kernels.selective import SelectiveWeights


def rows_of(
    sizes: RecurrentSizes, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[Tensor], SelectiveWeights, Tensor]:
    """Return inputs, step sizes, B and C, and gates of tokens, some of them strided; weights; and states."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    channels, size = sizes.channels, sizes.key_dim
    mixed, keys = rand(NUM_TOKENS, channels), rand(NUM_TOKENS, 5 + 2 * size) * size**-0.25
    both, pace = rand(NUM_TOKENS, 2 * channels), rand(NUM_TOKENS, channels)
    weights = SelectiveWeights(
        rand(sizes.width, channels), None, -rand(channels, size).abs(), rand(channels) - 3.0, rand(channels)
    )
    state = (rand(NUM_SLOTS, sizes.state_numbers + 48) * 0.3)[:, 16:-16]
    given = [mixed.to(dtype), pace.to(dtype), keys.to(dtype)[:, 5:], both.to(dtype)[:, channels:]]
    return given, weights, state


def scanned(
    rows: list[Tensor], weights: SelectiveWeights, state: Tensor, segments: list[tuple[int, ...]], sizes: RecurrentSizes
) -> tuple[Tensor, Tensor]:
    """What tokens give [tokens, channels], and the states afterwards; float64, on the CPU."""
    mixed, pace, keys, gate = (each.double().cpu() for each in rows)
    rate, bias, skip = (each.double().cpu() for each in weights[2:])
    before = state.double().cpu()
    after, out, vector = before.clone(), torch.zeros(NUM_TOKENS, sizes.channels).double(), before[0]
    for first, count, read, written in segments:
        if written < 0:
            continue
        if read != SAME_RUN:
            vector = before[read] if read >= 0 else torch.zeros_like(before[0])
            vector = vector[: sizes.matrix_numbers].view(sizes.channels, sizes.key_dim)
        for token in range(first, first + count):
            step, (key, query) = F.softplus(pace[token] + bias), keys[token].chunk(2)
            vector = (step[:, None] * rate).exp() * vector + torch.outer(step * mixed[token], key)
            out[token] = (vector @ query + skip * mixed[token]) * F.silu(gate[token])
        after[written, : sizes.matrix_numbers] = vector.flatten()
    return out, after
