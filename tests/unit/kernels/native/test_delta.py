"""Gated delta nets by torch and compiled, against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from delta_cases import DeltaCase, delta_case, expected
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.structures import ProgramStep
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference import delta
from quire.kernels.reference.convolution import convolve

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
SIZES = [RecurrentSizes(2, 4, 16, 24, 4), RecurrentSizes(1, 3, 8, 16, 2), RecurrentSizes(2, 2, 64, 80, 4)]


def by_torch(case: DeltaCase) -> Tensor:
    segments, sizes = case.segments.tolist(), case.sizes
    mixed = convolve(case.qkvz, case.weights.convolution, case.state, segments, sizes)
    gate = case.qkvz[:, sizes.channels :]
    return delta.gated_delta(mixed, gate, case.gates, case.weights, case.state, segments, sizes)


def compiled(case: DeltaCase) -> Tensor:
    """The inputs come from the stream, which the result is written to."""
    sizes, both = case.sizes, torch.cat((case.qkvz, case.gates), dim=1)
    writer = ProgramWriter(both.dtype, both.shape[1])
    qkvz = writer.call(lambda x, _: x[:, : case.qkvz.shape[1]], (writer.stream,), case.qkvz.shape[1])
    gates = writer.call(lambda x, _: x[:, case.qkvz.shape[1] :], (writer.stream,), 2 * sizes.value_heads)
    found: list[Tensor] = []
    out = writer.delta(qkvz, gates, 0, sizes, case.weights)
    writer.call(lambda x, _: found.append(x.clone()) or x, (out,), sizes.value_size)
    nothing = torch.empty(0, dtype=torch.int64)
    step = ProgramStep(
        (nothing,), (nothing,), nothing.view(0, 4), None, [(torch.empty(0), torch.empty(0))], (), None,
        states=(case.state,), segments=case.segments,
    )  # fmt: skip
    writer.finish(writer.stream).run(both, step)
    return found[0]


WAYS = [by_torch, pytest.param(compiled, marks=pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(sizes: RecurrentSizes, alike: bool, way: object) -> None:
    case = delta_case(sizes, alike=alike)
    out, state = expected(case)
    found = way(case)  # type: ignore[operator]
    torch.testing.assert_close(found.double(), out, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(case.state.double(), state, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_compiled_tokens_do_not_depend_on_how_a_run_is_cut() -> None:
    whole, cut = (delta_case(SIZES[0]) for _ in range(2))
    whole.segments, cut.segments = whole.segments[3:4].copy(), whole.segments[3:4].copy().repeat(2, axis=0)
    cut.segments[:, 1], cut.segments[1, 0] = (17, 23), 20
    cut.segments[1, 2:] = (-2, 7)
    found = compiled(whole), compiled(cut)
    torch.testing.assert_close(found[0][3:43], found[1][3:43], rtol=0, atol=0)
    count = SIZES[0].state_numbers
    torch.testing.assert_close(whole.state[0, :count], cut.state[7, :count], rtol=0, atol=0)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_bfloat16_rows_are_close() -> None:
    case = delta_case(RecurrentSizes(2, 4, 32, 48, 4), torch.bfloat16)
    out, _ = expected(case)
    difference = (compiled(case).double() - out).abs()
    assert difference.mean() < 4e-3
    assert difference.max() < 0.4
