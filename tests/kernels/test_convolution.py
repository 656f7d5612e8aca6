"""The convolutions of recurrent layers by Triton and by torch, against their definition: silu, biases, gates."""

from __future__ import annotations

import pytest
import torch

from convolution_cases import convolved
from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.triton.convolution import convolve_segments
from triton_cases import DEVICE, DTYPES, ON_GPU

# Short convolutions have no keys; Mamba-2 layers have a bias.
SIZES = [RecurrentSizes(1, 40, 0, 1, 3), RecurrentSizes(2, 4, 8, 16, 4)]
SIZES += [RecurrentSizes(1, 2_048, 0, 1, 3), RecurrentSizes(8, 128, 128, 64, 4)] if ON_GPU else []
ROUGH = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "biased", "decodes"), [(True, True, False), (False, True, True), (True, False, True)]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(
    sizes: RecurrentSizes, gated: bool, biased: bool, decodes: bool, dtype: torch.dtype, by_triton: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    x = rand(NUM_TOKENS, sizes.channels * (3 if gated else 1)).to(dtype).to(DEVICE)
    weight, bias = rand(sizes.width, sizes.channels).to(DEVICE), rand(sizes.channels).to(DEVICE) if biased else None
    state = (rand(NUM_SLOTS, sizes.state_numbers + 32) * 0.3).to(DEVICE)[:, 16:-16]
    out, after = convolved(x, weight, bias, state, segments, sizes, gated=gated)
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        memory = (state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes)
        found = convolve_segments(x, weight, *memory, has_chunks=not decodes, bias=bias, gated=gated)
    else:
        found = convolve(x, weight, state, segments, sizes, bias=bias, gated=gated)
    used, rough = [token for first, count, *_ in segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(state.double().cpu(), after, rtol=10 * rough, atol=rough)
