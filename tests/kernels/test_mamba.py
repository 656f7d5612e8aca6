"""Mamba-2 by Triton and by torch, against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mamba_cases import mamba_case, scanned
from quire.kernels.mamba import GatedNorm
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.mamba import gate_and_norm, scan
from quire.kernels.triton.mamba import gate_rows, scan_segments
from triton_cases import DEVICE, DTYPES, ON_GPU

SIZES = [RecurrentSizes(2, 4, 16, 24, 4), RecurrentSizes(1, 2, 8, 40, 2)]
SIZES += [RecurrentSizes(1, 8, 128, 64, 4), RecurrentSizes(8, 16, 256, 64, 4)] if ON_GPU else []
ROUGH = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(
    sizes: RecurrentSizes, dtype: torch.dtype, decodes: bool, by_triton: bool
) -> None:
    case = mamba_case(sizes, dtype, str(DEVICE), decodes=decodes)
    out, state = scanned(case)
    if by_triton:
        table = torch.tensor(case.segments, dtype=torch.int32, device=DEVICE)
        memory = (case.state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes)
        found = scan_segments(case.mixed, case.pace, case.weights, *memory, has_chunks=not decodes)
    else:
        found = scan(case.mixed, case.pace, case.weights, case.state, case.segments, sizes)
    used, rough = [token for first, count, *_ in case.segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(case.state.double().cpu(), state, rtol=10 * rough, atol=rough)


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "norm_first"), [(96, False), (48, False), (48, True), (None, False)])
def test_outputs_are_gated_and_normed(group: int | None, norm_first: bool, dtype: torch.dtype, by_triton: bool) -> None:
    case, norm = mamba_case(SIZES[0], dtype, str(DEVICE)), GatedNorm(group, 1e-5, norm_first)
    read, z, weight = case.mixed[:, :96].float().contiguous(), case.z, case.weights.norm
    gate, expected = F.silu(z.double()), read.double()
    expected = expected if norm_first else expected * gate
    if group is not None:
        by_group = expected.unflatten(1, (-1, group))
        expected = (by_group / (by_group.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
    expected = (expected * gate if norm_first else expected) * weight
    found = gate_rows(read, z, weight, norm) if by_triton else gate_and_norm(read, z, weight, norm)
    torch.testing.assert_close(found.double(), expected, rtol=10 * ROUGH[dtype], atol=ROUGH[dtype])
