"""The format of a quantized KV cache, in plain torch. All kernels that write or read a quantized cache agree with this
file.

float8 and int8: each head of a token has one float32 scale, which maps its largest magnitude to the largest value of
the format, so nothing is clipped. int4: each group of a head's elements has a scale and an offset, both float16; two
neighbouring elements share a byte, the first one in the low half. A NaN or an infinity makes the scale NaN, and so
every element that is read back of that head (of that group, for int4). The same happens to an int4 group with an
element below -65504, which a float16 offset cannot hold, or with a range of more than 15 * 65504.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.reference.quantize import LARGEST, LARGEST_INT8, inverse_scale, to_float8

INT4 = torch.uint8  # the dtype that stands for an int4 cache: two elements per byte
SCALED = (torch.float8_e4m3fn, torch.int8, INT4)
INT4_GROUP = 32  # elements of a head that share a scale and an offset; gcd(dim, 32) if 32 does not divide dim
LARGEST_INT4 = 15.0
LARGEST_HALF = 65504.0
LEAST = 1e-12  # lower bound of a head's largest magnitude, so that a head of zeros gets a finite inverse scale


def group_of(dim: int) -> int:
    """Return how many elements of an int4 head of size `dim` share a scale and an offset."""
    return math.gcd(dim, INT4_GROUP)


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize heads [..., dim] to a cache of `dtype`. Returns the values [..., dim] in `dtype`, or [..., dim / 2] for
    int4, and the scales: [..., 1] in float32, or for int4 [..., groups, 2] in float16 (scale, offset)."""
    wide = x.float()
    if dtype == INT4:
        return _to_int4(wide)
    most = LARGEST_INT8 if dtype == torch.int8 else LARGEST
    amax = wide.abs().amax(dim=-1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax.clamp(min=LEAST), float("nan"))
    scaled = wide * inverse_scale(amax, most)
    scales = amax / most
    if dtype == torch.int8:
        return scaled.nan_to_num(0.0).round().clamp(-most, most).to(torch.int8), scales
    return to_float8(scaled), scales


def dequantize_heads(numbers: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize_heads`: return [..., dim] in float32."""
    if numbers.dtype != INT4:
        return numbers.float() * scales
    levels = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2).float()
    grouped = levels.unflatten(-1, (scales.shape[-2], -1))
    scale, offset = scales.float().unsqueeze(-2).unbind(-1)  # [..., groups, 1]
    wide: Tensor = grouped * scale + offset
    return wide.flatten(-2)


def _to_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.unflatten(-1, (-1, group_of(x.shape[-1])))
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    step = (high - low) / LARGEST_INT4
    fits = (low.abs() <= LARGEST_HALF) & (step <= LARGEST_HALF)  # False for NaN
    scale = torch.where(fits, step, float("nan")).half()
    offset = torch.where(fits, low, float("nan")).half()
    step = scale.float()
    above = (grouped - offset.float()[..., None]) / torch.where(step == 0, 1.0, step)[..., None]
    levels = above.nan_to_num(0.0).round().clamp(0, LARGEST_INT4).to(torch.uint8).flatten(-2)
    first, second = levels.unflatten(-1, (-1, 2)).unbind(-1)
    return first | (second << 4), torch.stack((scale, offset), dim=-1)


def read_heads(memory: Tensor, dtype: torch.dtype, block_size: int, dim: int) -> Tensor:
    """Dequantize blocks of heads [..., bytes], each the values of `block_size` tokens and then their scales, to [...,
    block, dim] in float32."""
    numbers, scales = split_heads(memory, dtype, block_size, dim)
    return dequantize_heads(numbers, scales)


def split_heads(memory: Tensor, dtype: torch.dtype, block_size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return views into blocks of heads [..., bytes]: the values [..., block, dim or dim / 2], and the scales [...,
    block, 1], or for int4 [..., block, groups, 2]."""
    width = dim // 2 if dtype == INT4 else dim
    numbers = memory[..., : block_size * width].unflatten(-1, (block_size, width)).view(dtype)
    begin = block_size * width
    if dtype == INT4:
        groups = dim // group_of(dim)
        stored = memory[..., begin : begin + block_size * groups * 4].view(torch.float16)
        return numbers, stored.unflatten(-1, (block_size, groups, 2))
    stored = memory[..., begin : begin + block_size * 4].view(torch.float32)
    return numbers, stored.unflatten(-1, (block_size, 1))
