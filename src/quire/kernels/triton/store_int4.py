"""Writes keys and values to an int4 cache: groups of a head's elements have a scale and an offset, two elements share a
byte."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import CacheScales
from quire.kernels.triton.attention_scaled import head_stride, int4_group
from quire.kernels.triton.launch import ROUNDING, await_inputs, check, power_of_two

LARGEST_HALF = tl.constexpr(65504.0)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)  # infinity and NaN are not at most this


@triton.jit
def _store_int4(
    qkv_ptr, position_ptr, row_ptr, blocks_ptr, key_ptr, value_ptr, key_scales, value_scales, qkv_stride,
    blocks_stride, max_blocks, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store one key or value head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int64)
    if (row >= 0) & (position // BLOCK_SIZE < max_blocks):
        block = tl.load(blocks_ptr + row * blocks_stride + position // BLOCK_SIZE).to(tl.int64)
        group, number = tl.arange(0, GROUPS_PAD), tl.arange(0, GROUP)
        real = group < DIM // GROUP
        places = group[:, None] * GROUP + number[None, :]
        at = qkv_ptr + token * qkv_stride + (QUERIES + head) * DIM
        x = tl.load(at + places, mask=real[:, None], other=0.0).to(tl.float32)  # [groups, group]
        low = tl.min(x, 1)
        wide = tl.div_rn(tl.max(x, 1) - low, 15.0)
        fits = (tl.min((tl.abs(x) <= LARGEST_FLOAT).to(tl.int32), 1) > 0) & (tl.abs(low) <= LARGEST_HALF)
        fits &= wide <= LARGEST_HALF
        scale = tl.where(fits, wide, float("nan")).to(tl.float16)
        offset = tl.where(fits, low, float("nan")).to(tl.float16)
        step = scale.to(tl.float32)
        step = tl.where(step == 0.0, 1.0, step)
        above = tl.div_rn(x - offset.to(tl.float32)[:, None], tl.broadcast_to(step[:, None], x.shape))
        whole = (above + ROUNDING) - ROUNDING  # round to nearest even
        levels = tl.where(whole == whole, tl.minimum(tl.maximum(whole, 0.0), 15.0), 0.0).to(tl.uint8)
        first, second = tl.split(tl.reshape(levels, [GROUPS_PAD, GROUP // 2, 2]))
        own = head % KEYS
        slot = block * STRIDE + own * HEAD_STRIDE + position % BLOCK_SIZE * (DIM // 2)
        pairs = slot + group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        of_scales = block * (STRIDE // 2) + own * (HEAD_STRIDE // 2) + position % BLOCK_SIZE * (2 * (DIM // GROUP))
        of_scales += 2 * group
        if head < KEYS:
            tl.store(key_ptr + pairs, first | (second << 4), mask=real[:, None])
            tl.store(key_scales + of_scales, scale, mask=real)
            tl.store(key_scales + of_scales + 1, offset, mask=real)
        else:
            tl.store(value_ptr + pairs, first | (second << 4), mask=real[:, None])
            tl.store(value_scales + of_scales, scale, mask=real)
            tl.store(value_scales + of_scales + 1, offset, mask=real)


def store_int4(
    qkv: Tensor,  # [tokens, (query + 2 * kv heads) * dim]
    positions: Tensor,  # [tokens]
    rows: Tensor,  # [tokens]; negative: padding
    blocks: Tensor,  # [rows, max blocks] int32
    caches: tuple[Tensor, Tensor],  # [blocks, kv heads, block, dim / 2] bytes
    scales: CacheScales | None,
    query_heads: int,
    dependent: bool = False,
) -> None:
    """Write the keys and values of each token to the paged cache. A token past the end of its row of `blocks` is not
    stored."""
    check(scales is not None, "an int4 cache has scales")
    assert scales is not None
    _, kv_heads, block_size, pairs = caches[0].shape
    group = int4_group(caches[0].dtype, 2 * pairs)
    _store_int4[(len(qkv), 2 * kv_heads)](
        qkv, positions, rows, blocks, *caches, *scales, qkv.stride(0), blocks.stride(0), blocks.shape[1],
        QUERIES=query_heads, KEYS=kv_heads, BLOCK_SIZE=block_size, STRIDE=caches[0].stride(0),
        HEAD_STRIDE=head_stride(caches[0]), DIM=2 * pairs, GROUP=group,
        GROUPS_PAD=power_of_two(2 * pairs // group), DEPENDENT=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
