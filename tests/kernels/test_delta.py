"""Gated delta nets by Triton, against their definition."""

from __future__ import annotations

import pytest
import torch

from delta_cases import delta_case, expected
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.reference.delta import gated_delta
from quire.kernels.triton.convolution import convolve_segments
from quire.kernels.triton.delta import delta_segments
from triton_cases import DEVICE, DTYPES, ON_GPU

SIZES = [RecurrentSizes(2, 4, 16, 24, 4), RecurrentSizes(1, 1, 8, 16, 2)]
SIZES += [RecurrentSizes(4, 8, 128, 128, 4)] if ON_GPU else []
ROUGH = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(sizes: RecurrentSizes, dtype: torch.dtype, alike: bool) -> None:
    case = delta_case(sizes, dtype, str(DEVICE), alike=alike)
    out, state = expected(case)
    spans, slots = (torch.from_numpy(case.segments[:, at : at + 2].copy()).int().to(DEVICE) for at in (0, 2))
    mixed = convolve_segments(case.qkvz, case.weights.convolution, case.state, spans, slots, sizes, has_chunks=True)
    found = delta_segments(mixed, case.qkvz, case.gates, case.weights, case.state, spans, slots, sizes, has_chunks=True)
    rough = ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu(), out, rtol=10 * rough, atol=rough)
    torch.testing.assert_close(case.state.double().cpu(), state, rtol=10 * rough, atol=rough)


@pytest.mark.parametrize("by_triton", [True, False])
def test_strengths_may_be_larger_than_one(by_triton: bool) -> None:
    case = delta_case(SIZES[0], device=str(DEVICE), most=2.0)
    out, state = expected(case)
    spans, slots = (torch.from_numpy(case.segments[:, at : at + 2].copy()).int().to(DEVICE) for at in (0, 2))
    memory, qkvz, weights = (case.state, spans, slots, case.sizes), case.qkvz, case.weights
    if by_triton:
        mixed = convolve_segments(qkvz, weights.convolution, *memory, has_chunks=True)
        found = delta_segments(mixed, qkvz, case.gates, weights, *memory, has_chunks=True)
    else:
        segments = case.segments.tolist()
        mixed = convolve(qkvz, weights.convolution, case.state, segments, case.sizes)
        z = qkvz[:, case.sizes.channels :]
        found = gated_delta(mixed, z, case.gates, weights, case.state, segments, case.sizes)
    torch.testing.assert_close(found.double().cpu(), out, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(case.state.double().cpu(), state, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_that_only_decode(sizes: RecurrentSizes, dtype: torch.dtype) -> None:
    case = delta_case(sizes, dtype, str(DEVICE))
    case.segments = case.segments[[0, 1, 2, -1]]
    out, state = expected(case)
    spans, slots = (torch.from_numpy(case.segments[:, at : at + 2].copy()).int().to(DEVICE) for at in (0, 2))
    rows = case.qkvz[:4], case.gates[:4]
    mixed = convolve_segments(rows[0], case.weights.convolution, case.state, spans, slots, sizes, has_chunks=False)
    found = delta_segments(mixed, *rows, case.weights, case.state, spans, slots, sizes, has_chunks=False)
    rough = ROUGH[dtype]
    torch.testing.assert_close(found[:3].double().cpu(), out[:3], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(case.state.double().cpu(), state, rtol=10 * rough, atol=rough)
