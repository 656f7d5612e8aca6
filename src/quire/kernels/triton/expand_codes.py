"""Matrices of e2m1 codes as packed for `coded_experts`, dequantized to bfloat16 for steps of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check


@triton.jit
def _float_of(bits, factor):
    """Dequantize codes at the places of sign, lowest exponent bits and highest mantissa bit of bfloat16."""
    exponent, half = bits >> 7 & 3, (bits >> 6 & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << exponent).to(tl.float32) * 0.5)
    return (tl.where(bits & 32768 != 0, -size, size) * factor * 1.0842021724855044e-19).to(tl.bfloat16)  # 2**-63


@triton.jit
def _expand_codes_kernel(data_ptr, out_ptr, panels, steps, INTERLEAVED: tl.constexpr):
    """Dequantize 64 inputs of a panel. One program per (step, panel)."""
    BLOCK: tl.constexpr = 544  # words
    MASK: tl.constexpr = 0x01C001C0
    step, panel = tl.program_id(0), tl.program_id(1)
    thread, sixteen = tl.arange(0, 128), tl.arange(0, 4)
    at = data_ptr + (panel.to(tl.int64) * steps + step) * BLOCK
    words = tl.load(at + thread[:, None] * 4 + sixteen[None, :]).to(tl.uint32, bitcast=True)
    scales = tl.load(at + 512 + thread // 4)[:, None] >> (sixteen // 2 * 8)[None, :]
    group = thread // 32 * 8 + thread % 32 // 4
    for number in tl.static_range(4):  # of a word: eight inputs apart, and eight rows apart
        if number == 0:
            bits = words & (MASK | 0x80008000)
        elif number == 1:
            bits = words << 3 & (MASK | 0x80008000)
        elif number == 2:
            bits = (words << 6 & MASK) | (words << 1 & 0x80008000)
        else:
            bits = (words >> 3 & MASK) | (words << 2 & 0x80008000)
        exponent = scales >> number % 2 * 16 & 255
        factor = (exponent << 23).to(tl.float32, bitcast=True) * 1.0842021724855044e-19
        low = _float_of((bits & 65535).to(tl.int32), factor).to(tl.uint16, bitcast=True).to(tl.int32)
        high = _float_of((bits >> 16 & 65535).to(tl.int32), factor).to(tl.uint16, bitcast=True).to(tl.int32)
        if INTERLEAVED:
            row = number % 2 * (panels * 32) + panel * 32 + group
        else:
            row = panel * 64 + group // 8 * 16 + number % 2 * 8 + group % 8
        column = step * 32 + sixteen * 8 + number // 2 * 4  # in words of two inputs
        to = out_ptr + row.to(tl.int64)[:, None] * (steps * 32) + column[None, :] + (thread % 4)[:, None]
        tl.store(to, low | high << 16)


def expand_codes(
    packed: Tensor,  # [panels, steps, bytes] uint8: one expert of a CodedStack
    out: Tensor,  # [panels * 64, steps * 64] bfloat16
    *,
    interleaved: bool,  # panels have eight rows of gate, eight of up, and so on; out has gate, then up
) -> Tensor:
    """Dequantize one expert's matrix, exactly."""
    panels, steps = packed.shape[:2]
    check(packed.is_contiguous() and packed.dtype == torch.uint8, "packed codes are contiguous")
    check(out.shape == (panels * 64, steps * 64) and out.is_contiguous(), "out is [outputs, inputs]")
    check(out.dtype == torch.bfloat16, "out is bfloat16")
    _expand_codes_kernel[(steps, panels)](
        packed.view(torch.int32), out.view(torch.int32), panels, steps, INTERLEAVED=interleaved, num_warps=4
    )
    return out
