"""A Mamba-2 layer by its definition, in float64 and token by token, and steps to compare kernels with it on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from quire.kernels.mamba import MambaWeights
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes


@dataclass
class MambaCase:
    sizes: RecurrentSizes
    weights: MambaWeights
    mixed: Tensor  # [tokens, channels]
    wide: Tensor  # [tokens, size of values + heads]: gates, then step sizes
    state: Tensor  # [slots, numbers], strided as in a cache
    segments: list[tuple[int, ...]]

    @property
    def z(self) -> Tensor:
        return self.wide[:, : self.sizes.value_size]

    @property
    def pace(self) -> Tensor:
        return self.wide[:, self.sizes.value_size :]


def mamba_case(
    sizes: RecurrentSizes, dtype: torch.dtype = torch.float32, device: str = "cpu", *, decodes: bool = False
) -> MambaCase:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    heads, size = sizes.value_heads, sizes.value_size
    weights = MambaWeights(
        rand(sizes.width, sizes.channels), None, -rand(heads).abs(), rand(heads) - 3.0, rand(heads),
        1.0 + 0.2 * rand(size),
    )  # fmt: skip
    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    state = (rand(NUM_SLOTS, sizes.state_numbers + 48) * 0.3)[:, 16:-16]
    wide, mixed = rand(NUM_TOKENS, size + heads).to(dtype), rand(NUM_TOKENS, sizes.channels)
    mixed[:, size:] *= sizes.key_dim**-0.25  # products of B and C are about 1, whatever the size of a state
    return MambaCase(sizes, weights, mixed.to(dtype), wide, state, segments)


def scanned(case: MambaCase) -> tuple[Tensor, Tensor]:
    """What tokens give [tokens, value size], and the states [slots, numbers] afterwards; float64, on the CPU."""
    sizes, before = case.sizes, case.state.double().cpu()
    rate, bias, skip = (each.double().cpu() for each in case.weights[2:5])
    mixed, paces, after = case.mixed.double().cpu(), case.pace.double().cpu(), before.clone()
    out, shape = torch.zeros(NUM_TOKENS, sizes.value_size).double(), (sizes.value_heads, sizes.key_dim, sizes.value_dim)
    matrices = before[0]
    for first, count, read, written in case.segments:
        if written < 0:
            continue
        if read != SAME_RUN:
            state = before[read] if read >= 0 else torch.zeros_like(before[0])
            matrices = state[: sizes.matrix_numbers].view(shape).clone()
        for token in range(first, first + count):
            x, key, query = mixed[token].split([sizes.value_size, sizes.key_size, sizes.key_size])
            step, given = F.softplus(paces[token] + bias), []
            for head, own in enumerate(x.view(sizes.value_heads, -1)):
                group = slice(head // (sizes.value_heads // sizes.key_heads) * sizes.key_dim, None)
                b, c = key[group][: sizes.key_dim], query[group][: sizes.key_dim]
                matrices[head] = (step[head] * rate[head]).exp() * matrices[head] + torch.outer(b, step[head] * own)
                given.append(matrices[head].T @ c + skip[head] * own)
            out[token] = torch.cat(given)
        after[written, : sizes.matrix_numbers] = matrices.flatten()
    return out, after
