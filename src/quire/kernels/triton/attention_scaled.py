"""Tiles of a quantized cache: loading them and applying their scales in attention.

A float8 or int8 head has one scale per token. A key's scale multiplies its scores and a value's scale multiplies its
weights, so the gemms run on the unscaled values. Weights times scales must stay within the range of float16, so the
running output is kept divided by a power of two near the largest scale so far (`reach`). Dividing by a power of two is
exact, so the rounding of weights does not depend on the scales of tokens that a row does not see. int4 elements are
dequantized in registers, since their groups have scales and offsets.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_tile import load_rows, weigh, widened
from quire.kernels.triton.launch import FLOAT8

COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, FLOAT8: tl.float16}
_INT4_GROUP = 32  # see reference/cache_quantize.py
NO_REACH = tl.constexpr(2.0**-100)  # initial `reach`


def compute_of(cache: torch.dtype, query: torch.dtype) -> tl.dtype:
    """Return the dtype of the attention gemms: the cache's, float16 for float8, the queries' for integer caches."""
    return COMPUTE.get(cache, COMPUTE[query])


def int4_group(cache: torch.dtype, dim: int) -> int:
    """Return how many elements of a head share a scale and an offset in an int4 cache; 0 for other caches."""
    return math.gcd(dim, _INT4_GROUP) if cache == torch.uint8 else 0


def head_stride(cache: Tensor) -> int:
    """Return the stride between heads of a block [blocks, kv heads, block, dim]; with a single head torch's stride may
    be arbitrary."""
    return cache.stride(1) if cache.shape[1] > 1 else cache.stride(0)


@triton.jit
def scales_of_head(scales, head, HEAD_STRIDE: tl.constexpr, GROUP: tl.constexpr):
    """Return where the scales of a head are within block 0. HEAD_STRIDE is in bytes; scales have four bytes, those of
    int4 two."""
    return scales + head * (HEAD_STRIDE // (2 if GROUP > 0 else 4))


@triton.jit
def load_scales(
    scales, ids, begin, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr
):  # fmt: skip
    """Load the float32 scale of each position of a tile, [N]; BLOCK_STRIDE in bytes."""
    place = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    return tl.load(scales + ids.to(tl.int64) * (BLOCK_STRIDE // 4) + place % BLOCK_SIZE)


@triton.jit
def load_nibbles(
    memory, scales, rows, ids, begin, end, dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load rows [N] of an int4 cache, see `slots`, as [N, DIM_PAD] in `dtype`: value * scale + offset of the group.
    Each byte is loaded for both of its elements, since a shuffle of elements before every gemm is beyond the compiler.
    """
    column = tl.arange(0, DIM_PAD)
    inside = (column < DIM)[None, :]
    pairs = tl.load(memory + (rows.to(tl.int64) * UNIT)[:, None] + (column // 2)[None, :], mask=inside, other=0)
    levels = (pairs.to(tl.int32) >> (column % 2 * 4)[None, :]) & 15
    place = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    own = ids.to(tl.int64) * (BLOCK_STRIDE // 2) + place % BLOCK_SIZE * (2 * (DIM // GROUP))
    where = scales + own[:, None] + (column // GROUP * 2)[None, :]
    scale = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(where + 1, mask=inside, other=0.0).to(tl.float32)
    return (levels.to(tl.float32) * scale + offset).to(dtype)


@triton.jit
def load_tile(
    memory, scales, rows, ids, begin, end, dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Load keys or values of a tile [N, DIM_PAD] in `dtype` from any cache, without per-head scales applied. WIDEN: see
    `widened`."""
    if GROUP > 0:
        numbers = load_nibbles(
            memory, scales, rows, ids, begin, end, dtype, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, DIM_PAD, UNIT, GROUP,
        )  # fmt: skip
    elif WIDEN:
        numbers = widened(load_rows(memory, rows, memory.dtype.element_ty, DIM, DIM_PAD, UNIT), dtype)
    else:
        numbers = load_rows(memory, rows, dtype, DIM, DIM_PAD, UNIT)
    return numbers


@triton.jit
def reach_of(reach, scales):
    """Return the largest power of two up to the largest scale so far, and the factor for an output that was divided by
    the previous one."""
    most = tl.maximum(reach, tl.max(scales, 0))
    most = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # without its mantissa
    return most, reach / most


@triton.jit
def fold_scaled(acc, top, total, reach, scores, unit, values, scales, PRECISION: tl.constexpr):
    """Like `fold`, for values that still lack their scales [N]; `acc` is the output divided by `reach`."""
    weights, fade, higher, total = weigh(top, total, scores, unit, 1)
    most, shrink = reach_of(reach, scales)
    weights = weights * (scales / most)[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc * (fade * shrink)[:, None], input_precision=PRECISION)
    return acc, higher, total, most
