"""The scan of Mamba layers by Triton and by torch, against its definition."""

from __future__ import annotations

import pytest
import torch

from delta_cases import SEGMENTS
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.selective import scan
from quire.kernels.triton.selective import scan_segments
from selective_cases import rows_of, scanned
from triton_cases import DEVICE, DTYPES

SIZES = [RecurrentSizes(0, 96, 16, 1, 4), RecurrentSizes(0, 40, 6, 1, 2)]
ROUGH = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(
    sizes: RecurrentSizes, dtype: torch.dtype, decodes: bool, by_triton: bool
) -> None:
    segments = [SEGMENTS[at] for at in (0, 1, 2, -1)] if decodes else SEGMENTS
    rows, weights, state = rows_of(sizes, dtype, DEVICE)
    out, wanted = scanned(rows, weights, state, segments, sizes)
    if by_triton:
        table = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        found = scan_segments(*rows, weights, state, table[:, :2].contiguous(), table[:, 2:].contiguous(), sizes)
    else:
        found = scan(*rows, weights, state, segments, sizes)
    used, rough = [token for first, count, *_ in segments for token in range(first, first + count)], ROUGH[dtype]
    torch.testing.assert_close(found.double().cpu()[used], out[used], rtol=10 * rough, atol=rough)
    torch.testing.assert_close(state.double().cpu(), wanted, rtol=10 * rough, atol=rough)
