"""Products that take norm, gate and addition along mean the same for one row, for a few and for many."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.kernels.norm import Norm
from quire.kernels.reference.elementwise import rms_norm
from quire.kernels.triton.gemm_skinny_plan import OWN_ROWS
from quire.runtime.layers.skinny import TritonGemm, TritonMultiply
from tiny_models import DEVICE

INPUTS, OUTPUTS, FEW = 24, 32, 3


@pytest.fixture
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonMultiply:
    monkeypatch.setitem(OWN_ROWS, (OUTPUTS, INPUTS), FEW)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).to(DEVICE)
    bias = torch.randn(OUTPUTS, generator=generator).to(DEVICE) if request.param else None
    packed = TritonGemm(torch.float32, torch.device(DEVICE), dependent_rows=sys.maxsize).pack(weight, bias)
    assert isinstance(packed, TritonMultiply)
    assert packed.few == FEW
    return packed


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("multiply", [False, True], indirect=True)
def test_every_way_is_the_plain_formula(multiply: TritonMultiply, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator).to(DEVICE)
    norm = Norm(torch.randn(INPUTS, generator=generator).to(DEVICE), 1e-5)
    near = {"rtol": 1e-4, "atol": 1e-4}

    def plain(of: torch.Tensor) -> torch.Tensor:
        return F.linear(of, multiply.weight, multiply.bias)

    torch.testing.assert_close(multiply(x), plain(x), **near)
    normed = plain(rms_norm(x, norm.weight, norm.eps))
    torch.testing.assert_close(multiply.after_norm(x, norm), normed, **near)
    gate, up = normed.chunk(2, dim=-1)
    torch.testing.assert_close(multiply.gated(x, norm, "silu"), F.silu(gate) * up, **near)
    stream = torch.randn(rows, OUTPUTS, generator=generator).to(DEVICE)
    wanted = stream + plain(x)
    multiply.add_to(stream, x)
    torch.testing.assert_close(stream, wanted, **near)


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("multiply", [True], indirect=True)
def test_what_is_pending_is_added_before_the_norm(multiply: TritonMultiply, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, pending = (torch.randn(rows, INPUTS, generator=generator).to(DEVICE) for _ in range(2))
    norm, whole = Norm(torch.randn(INPUTS, generator=generator).to(DEVICE), 1e-5), x + pending
    stream = x.clone()
    torch.testing.assert_close(multiply.after_norm(stream, norm, pending), multiply.after_norm(whole, norm))
    torch.testing.assert_close(stream, whole)
    found = multiply.gated(x, norm, "silu", pending)
    torch.testing.assert_close(found, multiply.gated(whole, norm, "silu"))
    torch.testing.assert_close(x, whole)
