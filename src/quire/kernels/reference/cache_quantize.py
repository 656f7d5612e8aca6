"""Keys and values in a quantized cache, in plain torch: what all kernels that write or read one agree on.

float8 and int8: a head of a token has one scale, in float32, which takes its largest magnitude to the largest number:
nothing is ever cut off. int4: groups of a head's numbers have a scale and an offset, both float16; two neighbours share
a byte, the first one in its low half. A NaN or an infinity makes the scale NaN, and with it all that is read of the
head (of the group, for int4). So does an int4 number below -65504, which float16 has no offset for, or a range of more
than fifteen times that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.reference.quantize import LARGEST, LARGEST_INT8, inverse_scale, to_float8

INT4 = torch.uint8  # the dtype by which an int4 cache is known: bytes of two numbers
SCALED = (torch.float8_e4m3fn, torch.int8, INT4)
INT4_GROUP = 32  # numbers of a head that share a scale and an offset; fewer where 32 do not divide it
LARGEST_INT4 = 15.0
LARGEST_HALF = 65504.0
LEAST = 1e-12  # the magnitude that a head of zeros is taken to have


def group_of(dim: int) -> int:
    """How many numbers of an int4 head of `dim` share a scale and an offset."""
    return math.gcd(dim, INT4_GROUP)


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads [..., dim] as a cache of `dtype` holds them: numbers [..., dim], or [..., dim / 2] of int4, in `dtype`; and
    scales [..., 1] in float32, or [..., groups, 2] in float16: scale, offset."""
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
    """What `quantize_heads` kept, [..., dim] in float32."""
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
    fits = (low.abs() <= LARGEST_HALF) & (step <= LARGEST_HALF)  # not so for NaN
    scale = torch.where(fits, step, float("nan")).half()
    offset = torch.where(fits, low, float("nan")).half()
    step = scale.float()
    above = (grouped - offset.float()[..., None]) / torch.where(step == 0, 1.0, step)[..., None]
    levels = above.nan_to_num(0.0).round().clamp(0, LARGEST_INT4).to(torch.uint8).flatten(-2)
    first, second = levels.unflatten(-1, (-1, 2)).unbind(-1)
    return first | (second << 4), torch.stack((scale, offset), dim=-1)


def read_heads(memory: Tensor, dtype: torch.dtype, block_size: int, dim: int) -> Tensor:
    """Blocks of heads [..., bytes], each the numbers of `block_size` tokens and then their scales -> what they hold:
    [..., block, dim] in float32."""
    numbers, scales = split_heads(memory, dtype, block_size, dim)
    return dequantize_heads(numbers, scales)


def split_heads(memory: Tensor, dtype: torch.dtype, block_size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Blocks of heads [..., bytes] -> views of their numbers [..., block, dim or dim / 2] and of their scales [...,
    block, 1], or [..., block, groups, 2]."""
    width = dim // 2 if dtype == INT4 else dim
    numbers = memory[..., : block_size * width].unflatten(-1, (block_size, width)).view(dtype)
    begin = block_size * width
    if dtype == INT4:
        groups = dim // group_of(dim)
        stored = memory[..., begin : begin + block_size * groups * 4].view(torch.float16)
        return numbers, stored.unflatten(-1, (block_size, groups, 2))
    stored = memory[..., begin : begin + block_size * 4].view(torch.float32)
    return numbers, stored.unflatten(-1, (block_size, 1))
