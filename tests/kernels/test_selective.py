"""The scan of Mamba layers by Triton and by torch, against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes
from quire.kernels.reference.selective import scan
from quire.kernels.selective import SelectiveWeights
from quire.kernels.triton.selective import scan_segments
from triton_cases import DEVICE, DTYPES

SIZES = [RecurrentSizes(0, 96, 16, 1, 4), RecurrentSizes(0, 40, 6, 1, 2)]
ROUGH = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def rows_of(sizes: RecurrentSizes, dtype: torch.dtype) -> tuple[list[Tensor], SelectiveWeights, Tensor]:
    """Return inputs, step sizes, B and C, and gates of tokens, some of them strided; weights; and states."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

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


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(
    sizes: RecurrentSizes, dtype: torch.dtype, decodes: bool, by_triton: bool
) -> None:
    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    rows, weights, state = rows_of(sizes, dtype)
    out, wanted = scanned(rows, weights, state, segments, sizes)
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        found = scan_segments(*rows, weights, state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes)
    else:
        found = scan(*rows, weights, state, segments, sizes)
    used, rough = [token for first, count, *_ in segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(state.double().cpu(), wanted, rtol=10 * rough, atol=rough)
