"""Activations of a feed-forward network, and gated activations: activation(gate) * up in one pass over both halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    COMPILED,
    SMALL,
    await_inputs,
    check,
    check_rows,
    larger,
    load_chunk,
    power_of_two,
    row_block,
)
from quire.kernels.triton.quantize import store_quantized

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
PLAIN_ACTIVATIONS = ACTIVATIONS | {"relu2": 4}  # of MLPs whose gate is not fused into a gemm
_BLOCK = 1024
# 1 / (1 + 2 ** (-x / log(2))) by the approximations of the device, each to the last bit or two of a float32.
_SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def _sigmoid(x):
    if COMPILED:
        return tl.inline_asm_elementwise(_SIGMOID, "=f,f", (x,), tl.float32, True, 1)
    else:  # Triton compiles the code after a return too
        return tl.sigmoid(x)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply the activation with this number in `PLAIN_ACTIVATIONS`, float32 -> float32."""
    if KIND == 0:
        y = x * _sigmoid(x)
    elif KIND == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 0.5 (1 + tanh z) is sigmoid(2 z)
    else:
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN, here and below
        if KIND == 4:
            y = y * y
    return y


@triton.jit
def clamped(gate, up, limit, alpha, shift):
    """Apply a clamped silu gate, see Clamp, float32 -> float32."""
    kept = tl.where(gate > limit, limit, gate)
    bounded = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return kept * _sigmoid(kept * alpha) * (bounded + shift)


@triton.jit
def _activate_kernel(x_ptr, x_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Apply an activation in place. One program per (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * x_stride + column
    x = tl.load(at, mask=column < size, other=0.0)
    tl.store(at, activate(x.to(tl.float32), KIND).to(x.dtype), mask=column < size)


@triton.jit
def _times(gate, up, KIND: tl.constexpr):
    """Return activation(gate) * up, with the activation rounded to the dtype before the multiplication."""
    return activate(gate.to(tl.float32), KIND).to(gate.dtype) * up


@triton.jit
def _sum_of(x_ptr, change_ptr, column, size):
    """Return x + change at some columns, rounded to the dtype of x, zero past the end."""
    x = tl.load(x_ptr + column, mask=column < size, other=0.0)
    change = tl.load(change_ptr + column, mask=column < size, other=0.0)
    return (x.to(tl.float32) + change.to(tl.float32)).to(x.dtype)


@triton.jit
def _gate_kernel(
    x_ptr, change_ptr, out_ptr, x_stride, change_stride, out_stride, size,
    KIND: tl.constexpr, HAS_CHANGE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gated activation, optionally of x + change. One program per (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    gate_ptr = x_ptr + row * x_stride
    if HAS_CHANGE:
        change = change_ptr + row * change_stride
        gate = _sum_of(gate_ptr, change, column, size)
        up = _sum_of(gate_ptr + size, change + size, column, size)
        y = _times(gate, up, KIND)
    else:
        gate = tl.load(gate_ptr + column, mask=column < size, other=0.0)
        y = _times(gate, tl.load(gate_ptr + size + column, mask=column < size, other=0.0), KIND)
    tl.store(out_ptr + row * out_stride + column, y, mask=column < size)


@triton.jit
def _gate_quantized_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride,
    KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gated activation quantized with a scale per row. One program per row, which it holds in registers."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(DEPENDENT)
    gate_ptr = x_ptr + row * x_stride
    most = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    values = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, SIZE, BLOCK):
        gate = load_chunk(gate_ptr, start, SIZE, BLOCK)
        y = _times(gate, load_chunk(gate_ptr + SIZE, start, SIZE, BLOCK), KIND)
        most = larger(most, y)
        values += (y,)
    store_quantized(values, most, out_ptr + row * out_stride, scale_ptr + row, SIZE, BLOCK)


def activate_rows(x: Tensor, activation: str) -> None:
    """Apply one of PLAIN_ACTIVATIONS to x [rows, size] in place."""
    rows, size = x.shape
    check_rows(x, "x")
    kind = PLAIN_ACTIVATIONS[activation]
    if rows == 0:
        return
    block = min(power_of_two(size), _BLOCK)
    _activate_kernel[(rows, triton.cdiv(size, block))](
        x, x.stride(0), size, KIND=kind, BLOCK=block, num_warps=max(1, block // 256), num_stages=1
    )


def gate(
    gate_up: Tensor,  # [rows, 2 * size]: gate, then up
    activation: str,  # one of PLAIN_ACTIVATIONS
    out: Tensor | None = None,  # [rows, size], of gate_up's dtype, float8 or int8
    scale: Tensor | None = None,  # [rows] float32, for a float8 or int8 `out`
    dependent: bool = False,
    change: Tensor | None = None,  # [rows, 2 * size], of gate_up's dtype: added to it first; not if quantized
) -> Tensor:
    """Return activation(gate) * up, with the activation rounded to the dtype; optionally quantized to float8 or int8
    with a scale per row. dependent: programmatic dependent launch."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    check_rows(gate_up, "gate_up")
    check_rows(out, "out")
    check(out.shape == (rows, size) and gate_up.shape[1] == 2 * size, "out has half the columns of gate_up")
    quantized = out.dtype in SMALL
    check(quantized == (scale is not None), "a float8 or int8 out and a scale come together")
    fits = change is None or (change.shape == gate_up.shape and change.stride(1) == 1 and not quantized)
    check(fits, "change is like gate_up, and comes without a scale")
    kind = PLAIN_ACTIVATIONS[activation]
    if rows == 0:
        return out
    if quantized:
        block, warps = row_block(size)
        _gate_quantized_kernel[(rows,)](
            gate_up, out, scale, gate_up.stride(0), out.stride(0),
            KIND=kind, SIZE=size, BLOCK=block, DEPENDENT=dependent,
            num_warps=warps, num_stages=1, launch_pdl=dependent,
        )  # fmt: skip
        return out
    block = min(power_of_two(size), _BLOCK)
    _gate_kernel[(rows, triton.cdiv(size, block))](
        gate_up, change, out, gate_up.stride(0), 0 if change is None else change.stride(0), out.stride(0), size,
        KIND=kind, HAS_CHANGE=change is not None, BLOCK=block, DEPENDENT=dependent,
        num_warps=max(1, block // 256), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out
