"""The convolutions of recurrent layers by Triton and by torch, against their definition: silu, biases, gates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.triton.convolution import convolve_segments
from triton_cases import DEVICE, DTYPES, ON_GPU

# Short convolutions have no keys; Mamba-2 layers have a bias.
SIZES = [RecurrentSizes(1, 40, 0, 1, 3), RecurrentSizes(2, 4, 8, 16, 4)]
SIZES += [RecurrentSizes(1, 2_048, 0, 1, 3), RecurrentSizes(8, 128, 128, 64, 4)] if ON_GPU else []
ROUGH = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def expected(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, segments: list[tuple[int, ...]],
    sizes: RecurrentSizes, *, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What tokens give, and the states afterwards; float64, on the CPU, token by token."""
    x, weight, before = x.double().cpu(), weight.double().cpu(), state.double().cpu()
    after, out, tail = before.clone(), torch.zeros(len(x), sizes.channels, dtype=torch.float64), before[0]
    for first, count, read, written in segments:
        if written < 0:
            continue
        if read != SAME_RUN:
            tail = before[read] if read >= 0 else torch.zeros_like(before[0])
            tail = tail[sizes.matrix_numbers : sizes.state_numbers].view(-1, sizes.channels)
        for token in range(first, first + count):
            new = x[token, : sizes.channels] * (x[token, 2 * sizes.channels :] if gated else 1.0)
            inputs = torch.cat((tail, new[None]))
            mixed = (inputs * weight).sum(dim=0) + (0.0 if bias is None else bias.double().cpu())
            out[token] = mixed * x[token, sizes.channels :][: sizes.channels] if gated else F.silu(mixed)
            tail = inputs[1:]
        after[written, sizes.matrix_numbers : sizes.state_numbers] = tail.flatten()
    return out, after


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

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    x = rand(NUM_TOKENS, sizes.channels * (3 if gated else 1)).to(dtype).to(DEVICE)
    weight, bias = rand(sizes.width, sizes.channels).to(DEVICE), rand(sizes.channels).to(DEVICE) if biased else None
    state = (rand(NUM_SLOTS, sizes.state_numbers + 32) * 0.3).to(DEVICE)[:, 16:-16]
    out, after = expected(x, weight, bias, state, segments, sizes, gated=gated)
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        memory = (state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes)
        found = convolve_segments(x, weight, *memory, has_chunks=not decodes, bias=bias, gated=gated)
    else:
        found = convolve(x, weight, state, segments, sizes, bias=bias, gated=gated)
    used, rough = [token for first, count, *_ in segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(state.double().cpu(), after, rtol=10 * rough, atol=rough)
