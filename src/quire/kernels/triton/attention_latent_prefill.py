"""Prefill attention over latents (MLA): tiles of packed (token, query head) rows.

As attention_prefill.py, but a tile of latents is loaded once and used as keys and as values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, check_heads
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_latent import check_latents, load_columns, score_latents
from quire.kernels.triton.attention_prefill import PrefillPlan
from quire.kernels.triton.attention_scaled import COMPUTE
from quire.kernels.triton.attention_tile import EMPTY, block_ids, fold, slots
from quire.kernels.triton.launch import await_inputs, power_of_two, shared_memory

_LEAST_DIM = 16  # smallest K dimension of a gemm
_WIDE_BYTES, _NARROW_BYTES = 224 << 10, 148 << 10  # bytes of shared memory that tiles of 64 or 32 latents need


def latent_prefill_config(itemsize: int, device: torch.device) -> PrefillConfig:
    """Return the config for a cache with elements of `itemsize` bytes, tuned on an H200 and limited by its shared
    memory."""
    room = shared_memory(device)
    if itemsize == 4 or room < _NARROW_BYTES:
        return PrefillConfig(32, 16, 8, 1)
    return PrefillConfig(64, 64 if room >= _WIDE_BYTES else 32, 8, 2)


def latent_prefill(
    query: Tensor,  # [tokens, query heads, rank + rotated]
    latents: Tensor,  # [blocks, 1, block, rank + rotated]
    tables: Tensor,  # [table rows, max blocks], int32
    plan: PrefillPlan,
    rule: AttentionRule,
    *,
    out: Tensor,  # [tokens, query heads, rank]
    dependent: bool = False,
) -> None:
    """Write causal attention of the plan's chunks over all their cached latents, including their own, to `out`. Other
    tokens of `out` keep their contents."""
    check_latents(query, latents, rule)
    check_heads(out, "out")
    (_, query_heads, width), rank, config = query.shape, out.shape[2], plan.config
    _prefill[(plan.tiles.shape[0],)](
        query, out, latents, tables, plan.tiles, query.stride(0), out.stride(0), tables.stride(0), rule.factor,
        rule.value_scale, HEADS=query_heads, WIDTH=width, RANK=rank, RANK_PAD=power_of_two(rank),
        REST_PAD=max(_LEAST_DIM, power_of_two(width - rank)), BLOCK_SIZE=latents.shape[2],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, COMPUTE=COMPUTE[latents.dtype],
        PRECISION="ieee" if latents.dtype == torch.float32 else "tf32", DEPENDENT=dependent,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _prefill(
    query, out, latents, tables, tiles, query_stride, out_stride, table_stride, factor, value_scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run one tile of packed query rows."""
    record = tiles + tl.program_id(0) * 8
    begin, start, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row, first = tl.load(record + 3), tl.load(record + 4)
    await_inputs(DEPENDENT)
    if count == 0:
        return
    lowest, highest = first // HEADS, tl.minimum((first + BLOCK_M - 1) // HEADS, count - 1)  # tokens of the tile
    table, end = tables + row.to(tl.int64) * table_stride, start + highest + 1  # end of the keys
    packed = first + tl.arange(0, BLOCK_M)
    token, head, real = packed // HEADS, packed % HEADS, packed < count * HEADS
    places = query + (begin + token).to(tl.int64) * query_stride + head * WIDTH
    q = load_columns(places, real, RANK, RANK_PAD).to(COMPUTE)
    q_rest = load_columns(places + RANK, real, WIDTH - RANK, REST_PAD).to(COMPUTE)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    top = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    seen_by_all, position = start + lowest + 1, start + token
    ids = block_ids(table, 0, end, BLOCK_N, BLOCK_SIZE)
    for at in tl.range(0, end, BLOCK_N):
        rows = slots(ids, at, end, BLOCK_N, BLOCK_SIZE, BLOCK_SIZE * WIDTH, WIDTH)
        ids = block_ids(table, at + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)  # for the next iteration
        k, scores = score_latents(q, q_rest, latents, rows, WIDTH, RANK, PRECISION)
        if at + BLOCK_N > seen_by_all:
            seen = at + tl.arange(0, BLOCK_N)
            visible = (seen[None, :] <= position[:, None]) & (seen < end)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        acc, top, total = fold(acc, top, total, scores, factor, k, PRECISION)
    total = tl.where(real, total, 1.0)  # a padding row may have seen no keys
    columns = tl.arange(0, RANK_PAD)
    to = out + ((begin + token).to(tl.int64) * out_stride + head * RANK)[:, None] + columns[None, :]
    mask = real[:, None] & (columns < RANK)[None, :]
    tl.store(to, (acc * (value_scale / total)[:, None]).to(out.dtype.element_ty), mask=mask)
