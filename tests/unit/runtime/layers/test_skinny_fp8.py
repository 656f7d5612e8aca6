"""Float8 gemms with fused norm, gate and addition return the same for one row, for a few and for many."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.kernels.norm import Norm
from quire.kernels.reference.elementwise import rms_norm
from quire.kernels.reference.gemm import gemm as reference_gemm
from quire.runtime.layers import skinny_fp8
from quire.runtime.layers.skinny_fp8 import Float8Gemm, Rows, ScaledMultiply
from quire.runtime.quantization.fp8 import ScaledRows, rounded
from triton_cases import DEVICE, ON_GPU, rand

INPUTS, OUTPUTS, FEW = 32, 48, 3
NEAR = {torch.float32: 2e-4, torch.float16: 1e-2}
LIBRARY = 2e-2 if ON_GPU else 1e-3  # there it rounds to bfloat16


def packed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, biased: bool) -> ScaledMultiply:
    monkeypatch.setattr(skinny_fp8, "own_rows", lambda *_: FEW)
    weight = rand(OUTPUTS, INPUTS, dtype=dtype, scale=INPUTS**-0.5)
    bias = rand(OUTPUTS, dtype=dtype, seed=1) if biased else None
    made = Float8Gemm(dtype, DEVICE, dependent_rows=sys.maxsize).pack(weight, bias)
    assert isinstance(made, ScaledMultiply)
    torch.testing.assert_close(made.weight.values(dtype), rounded(weight))
    return made


def added(multiply: ScaledMultiply, stream: torch.Tensor, x: Rows) -> torch.Tensor:
    """The stream after the gemm's outputs were added to it, at once or later."""
    pending = multiply.add_to(stream, x)
    assert (pending is None) == (len(stream) <= multiply.few)
    return stream if pending is None else stream + pending


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_way_is_the_plain_formula_over_rounded_numbers(
    rows: int, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = packed(monkeypatch, dtype, biased=biased)
    x, norm = rand(rows, INPUTS, dtype=dtype, seed=2), Norm(rand(INPUTS, dtype=dtype, seed=3), 1e-5)
    bias = None if multiply.bias is None else multiply.bias.float()

    def plain(of: torch.Tensor) -> torch.Tensor:
        of = of if rows == 1 else rounded(of)
        return F.linear(of.float(), multiply.weight.values(torch.float32), bias)

    def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert found.dtype == dtype
        bound = max(NEAR[dtype], LIBRARY) if rows > FEW else NEAR[dtype]
        torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound)

    near(multiply(x), plain(x))
    normed = plain(rms_norm(x, norm.weight, norm.eps))
    near(multiply.after_norm(x, norm), normed)
    stream = rand(rows, OUTPUTS, dtype=dtype, seed=4)
    wanted = stream.float() + plain(x)
    near(added(multiply, stream, x), wanted)


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
def test_the_gate_passes_its_rows_to_the_next_gemm(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = packed(monkeypatch, torch.float32, biased=True)
    gemm = Float8Gemm(torch.float32, DEVICE, dependent_rows=sys.maxsize)
    down = gemm.pack(rand(INPUTS, OUTPUTS // 2, seed=5), None)
    assert isinstance(down, ScaledMultiply)
    x, norm = rand(rows, INPUTS, seed=2), Norm(rand(INPUTS, seed=3), 1e-5)
    gated = gate_up.gated(x, norm, "silu")
    assert isinstance(gated, ScaledRows) == (rows > FEW)
    found = gated.values(torch.float32) if isinstance(gated, ScaledRows) else gated
    normed = rms_norm(x, norm.weight, norm.eps)
    numbers = normed if rows == 1 else rounded(normed)
    gate, up = F.linear(numbers, gate_up.weight.values(torch.float32), gate_up.bias).chunk(2, dim=-1)
    wanted = F.silu(gate) * up
    torch.testing.assert_close(found, rounded(wanted) if rows > FEW else wanted, rtol=0.07, atol=LIBRARY)
    stream = added(down, torch.zeros(rows, INPUTS, device=DEVICE), gated)
    numbers = found if rows == 1 else rounded(found)
    torch.testing.assert_close(stream, F.linear(numbers, down.weight.values(torch.float32)), rtol=LIBRARY, atol=LIBRARY)


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
def test_what_is_pending_is_added_before_the_norm(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = packed(monkeypatch, torch.float32, biased=False)
    x, pending, norm = rand(rows, INPUTS, seed=2), rand(rows, INPUTS, seed=4), Norm(rand(INPUTS, seed=3), 1e-5)
    whole, stream = x + pending, x.clone()
    found = multiply.after_norm(stream, norm, pending)
    torch.testing.assert_close(found, multiply.after_norm(whole, norm), rtol=0.1, atol=0.1 if rows == 1 else 1e-5)
    torch.testing.assert_close(stream, whole)
    gated = [multiply.gated(x, norm, "silu", pending), multiply.gated(whole, norm, "silu")]
    values = [rows.values(torch.float32) if isinstance(rows, ScaledRows) else rows for rows in gated]
    torch.testing.assert_close(*values, rtol=0.1, atol=0.1 if len(x) == 1 else 1e-5)
    torch.testing.assert_close(x, whole)


def test_more_rows_take_the_kernel_for_hopper_gpus_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on no other device: here the reference stands in for it."""
    taken: list[int] = []

    def scaled_gemm(x: torch.Tensor, weight: torch.Tensor, **given: Any) -> torch.Tensor:
        out, dependent = given.pop("out"), given.pop("dependent")
        assert not dependent
        taken.append(len(x))
        return out.copy_(reference_gemm(x, weight, **given))

    monkeypatch.setattr(skinny_fp8, "scaled_gemm", scaled_gemm)
    monkeypatch.setattr(skinny_fp8, "takes_rows", lambda rows, _: 2 <= rows <= 5)
    library = replace(packed(monkeypatch, torch.float32, biased=True), hopper=False)
    hopper = replace(library, hopper=True)
    norm = Norm(rand(INPUTS, seed=3), 1e-5)
    for rows, is_taken in ((1, False), (2, True), (5, True), (6, False)):
        x = rand(rows, INPUTS, seed=2)
        near = {"rtol": LIBRARY, "atol": LIBRARY}
        torch.testing.assert_close(hopper(x), library(x), **near)
        torch.testing.assert_close(hopper.after_norm(x, norm), library.after_norm(x, norm), **near)
        gated = [each.gated(x, norm, "silu") for each in (hopper, library)]
        values = [each.values(torch.float32) if isinstance(each, ScaledRows) else each for each in gated]
        torch.testing.assert_close(*values, rtol=0.07, atol=LIBRARY)
        stream = rand(rows, OUTPUTS, seed=4)
        wanted = stream.clone()
        pending, later = hopper.add_to(stream, x), library.add_to(wanted, x)
        assert (pending is None) == (is_taken or rows == 1)
        found, wanted = (a if b is None else a + b for a, b in ((stream, pending), (wanted, later)))
        torch.testing.assert_close(found, wanted, **near)
        assert taken == [rows] * 4 * is_taken
        taken.clear()
