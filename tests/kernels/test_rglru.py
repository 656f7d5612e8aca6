"""The scan of RG-LRU layers by Triton and by torch, and convolutions without silu, against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.reference.rglru import gates_of, scan
from quire.kernels.rglru import RgLruWeights
from quire.kernels.triton.convolution import convolve_segments
from quire.kernels.triton.rglru import scan_segments
from triton_cases import DEVICE, DTYPES

CASES = [(RecurrentSizes(0, 96, 1, 1, 4), 4), (RecurrentSizes(0, 140, 1, 1, 2), 7)]  # and blocks of gates
ROUGH = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
Case = tuple[Tensor, Tensor, RgLruWeights, Tensor]  # inputs, side inputs, weights, states


def case_of(sizes: RecurrentSizes, blocks: int, dtype: torch.dtype) -> Case:
    generator, channels = torch.Generator().manual_seed(0), sizes.channels
    both = torch.randn(NUM_TOKENS, 2 * channels, generator=generator).to(dtype)  # strided as behind a gemm
    size = channels // blocks
    weights = RgLruWeights(
        torch.randn(sizes.width, channels, generator=generator), torch.randn(channels, generator=generator),
        -8.0 * torch.rand(channels, generator=generator),
        (torch.randn(blocks, size, 2 * size, generator=generator) * size**-0.5).to(dtype),
        torch.randn(blocks, 1, 2 * size, generator=generator).to(dtype),
    )  # fmt: skip
    state = torch.randn(NUM_SLOTS, sizes.state_numbers + 3, generator=generator)
    x, side = both[:, :channels].to(DEVICE), both[:, channels:].to(DEVICE)
    return x, side, RgLruWeights(*(each.to(DEVICE) for each in weights)), state.to(DEVICE)


def scanned(
    mixed: Tensor, gates: Tensor, side: Tensor, weights: RgLruWeights, state: Tensor,
    segments: list[tuple[int, int, int, int]], channels: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and states, token by token in float64."""
    x, side, rate, state = (each.double().cpu() for each in (mixed, side, weights.rate, state))
    into, keeps = (part.transpose(0, 1).flatten(1) for part in gates.double().cpu().chunk(2, dim=2))
    keep, out, number = torch.exp(rate * keeps.sigmoid()), torch.zeros_like(x), torch.zeros(channels).double()
    for first, count, source, slot in segments:
        if slot < 0:
            continue
        number = number if source == SAME_RUN else state[max(source, 0), :channels].clone()
        for token in range(first, first + count):
            gated = x[token] * into[token].sigmoid()
            is_first = source == -1 and token == first
            number = gated if is_first else keep[token] * number + (1 - keep[token] ** 2).sqrt() * gated
            out[token] = number * F.gelu(side[token], approximate="tanh")
        state[slot, :channels] = number
    return out, state


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "blocks"), CASES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(
    sizes: RecurrentSizes, blocks: int, dtype: torch.dtype, decodes: bool, by_triton: bool
) -> None:
    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    x, side, weights, state = case_of(sizes, blocks, dtype)
    mixed = x.contiguous()
    gates = gates_of(mixed, weights)
    out, wanted = scanned(mixed, gates, side, weights, state, segments, sizes.channels)
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        parts = table[:, :2].contiguous(), table[:, 2:].contiguous()
        found = scan_segments(mixed, gates, side, weights, state, *parts, sizes)
    else:
        found = scan(mixed, gates, side, weights, state, segments, sizes)
    used, rough = [token for first, count, *_ in segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(state.double().cpu(), wanted, rtol=10 * rough, atol=rough)


def test_a_run_longer_than_a_piece_continues_in_the_next() -> None:
    sizes, blocks = CASES[0]
    generator = torch.Generator().manual_seed(1)
    _, _, weights, _ = case_of(sizes, blocks, torch.float32)
    mixed, side = torch.randn(2, 600, sizes.channels, generator=generator).to(DEVICE).unbind()
    state = torch.zeros(1, sizes.state_numbers, device=DEVICE)
    gates, segments = gates_of(mixed, weights), [(0, 600, -1, 0)]
    out, wanted = scanned(mixed, gates, side, weights, state, segments, sizes.channels)
    found = scan(mixed, gates, side, weights, state, segments, sizes)
    torch.testing.assert_close(found.double().cpu(), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double().cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_without_silu_is_a_sum_of_the_last_inputs(dtype: torch.dtype, by_triton: bool) -> None:
    sizes, blocks = CASES[0]
    x, _, weights, state = case_of(sizes, blocks, dtype)
    count, bias = 5, weights.convolution_bias
    padded = F.pad(x[:count].double().cpu(), (0, 0, sizes.width - 1, 0))
    taps = weights.convolution.double().cpu()
    wanted = sum(padded[tap : tap + count] * taps[tap] for tap in range(sizes.width)) + bias.double().cpu()
    segments = [(0, count, -1, 0)]
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        memory = weights.convolution, state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes
        found = convolve_segments(x, *memory, has_chunks=True, bias=bias, silu=False)
    else:
        found = convolve(x, weights.convolution, state, segments, sizes, bias=bias, silu=False)
    torch.testing.assert_close(found[:count].double().cpu(), wanted, rtol=10 * ROUGH[dtype], atol=ROUGH[dtype])
