"""Mamba-2 layers and convolutions by the compiled kernels, against their definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convolution_cases import convolved
from delta_cases import NUM_SLOTS, NUM_TOKENS, SEGMENTS
from mamba_cases import MambaCase, mamba_case, scanned
from quire.kernels.mamba import GatedNorm
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program import ProgramWriter, Symbol
from quire.kernels.native.structures import ProgramStep
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
SIZES = [RecurrentSizes(2, 4, 16, 24, 4), RecurrentSizes(1, 2, 7, 40, 2), RecurrentSizes(1, 3, 32, 80, 4)]
ROUGH = {torch.float32: 2e-4, torch.bfloat16: 6e-2}


def run(x: Tensor, state: Tensor, segments: list[tuple[int, ...]], layer: Callable[[Symbol], Symbol]) -> Tensor:
    """The inputs come from the stream; what the layer gives is caught by a call."""
    found: list[Tensor] = []
    writer = ProgramWriter(x.dtype, x.shape[1])
    out = layer(writer.stream)
    writer.call(lambda made, _: found.append(made.clone()) or made, (out,), out.width)
    nothing = torch.empty(0, dtype=torch.int64)
    step = ProgramStep(
        (nothing,), (nothing,), nothing.view(0, 4), None, [(torch.empty(0), torch.empty(0))], (), None,
        states=(state,), segments=np.array(segments, dtype=np.int64),
    )  # fmt: skip
    writer.finish(writer.stream).run(x.clone(), step)
    return found[0]


def with_inputs(case: MambaCase) -> Tensor:
    """Rows of a layer whose convolution changes only signs and sizes as silu does: its last tap is 1, all others 0."""
    case.weights.convolution.zero_()[-1] = 1.0
    return torch.cat((case.z, case.mixed, case.pace), dim=1)


def compiled(case: MambaCase, norm: GatedNorm) -> Tensor:
    x = with_inputs(case)
    return run(x, case.state, case.segments, lambda x: x.writer.mamba(x, 0, case.sizes, case.weights, norm))


def expected(case: MambaCase, norm: GatedNorm) -> tuple[Tensor, Tensor]:
    case.mixed = F.silu(case.mixed)
    (read, state), gate = scanned(case), F.silu(case.z.double())
    out = read if norm.norm_first else read * gate
    if norm.group is not None:
        groups = out.unflatten(1, (-1, norm.group))
        out = (groups / (groups.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()).flatten(1)
    return (out * gate if norm.norm_first else out) * case.weights.norm, state


@pytest.mark.parametrize("dtype", ROUGH)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("parts", "norm_first"), [(1, False), (2, True), (None, False)])
def test_tokens_and_states_are_those_of_the_definition(
    parts: int | None, norm_first: bool, sizes: RecurrentSizes, dtype: torch.dtype
) -> None:
    group = None if parts is None else sizes.value_size // parts
    case, again = mamba_case(sizes, dtype), mamba_case(sizes, dtype)
    found, norm = compiled(case, GatedNorm(group, 1e-5, norm_first)), GatedNorm(group, 1e-5, norm_first)
    out, state = expected(again, norm)
    torch.testing.assert_close(found.double(), out, rtol=10 * ROUGH[dtype], atol=5 * ROUGH[dtype])
    count = sizes.matrix_numbers
    torch.testing.assert_close(
        case.state[:, :count].double(), state[:, :count], rtol=10 * ROUGH[dtype], atol=2 * ROUGH[dtype]
    )


def test_tokens_do_not_depend_on_how_a_run_is_cut_nor_on_other_rows() -> None:
    norm, count = GatedNorm(96, 1e-5, norm_first=False), SIZES[0].state_numbers
    whole, cut, alone = (mamba_case(SIZES[0]) for _ in range(3))
    cut.segments = [(3, 17, -1, 0), (20, 23, SAME_RUN, 0)]
    alone.segments = [(3, 40, -1, 0)]
    outs = [compiled(case, norm) for case in (whole, cut, alone)]
    for found in outs[1:]:
        torch.testing.assert_close(found[3:43], outs[0][3:43], rtol=0, atol=0)
    for case in (cut, alone):
        torch.testing.assert_close(case.state[0, :count], whole.state[0, :count], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ROUGH)
@pytest.mark.parametrize(("gated", "biased"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [RecurrentSizes(1, 40, 0, 1, 3), RecurrentSizes(2, 4, 8, 16, 4)], ids=str)
def test_convolutions_are_those_of_the_definition(
    sizes: RecurrentSizes, gated: bool, biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = rand(NUM_TOKENS, sizes.channels * (3 if gated else 1)).to(dtype)
    weight, bias = rand(sizes.width, sizes.channels), rand(sizes.channels) if biased else None
    state = (rand(NUM_SLOTS, sizes.state_numbers + 32) * 0.3)[:, 16:-16]
    out, after = convolved(x, weight, bias, state, SEGMENTS, sizes, gated=gated)
    found = run(x, state, SEGMENTS, lambda x: x.writer.convolve(x, 0, sizes, weight, bias, gated=gated))
    torch.testing.assert_close(found.double(), out, rtol=10 * ROUGH[dtype], atol=ROUGH[dtype])
    torch.testing.assert_close(state.double(), after, rtol=10 * ROUGH[dtype], atol=ROUGH[dtype])
