"""Paged prefill attention on Hopper GPUs with warp specialization: one warp loads keys and values by TMA, two warp
groups run wgmma.

Uses the same tiles as `attention_prefill`. The loading warp copies each block of the cache by TMA, a few tiles of keys
ahead. Each warp group owns half of a tile's rows. It issues the score gemm (QK^T) of the next keys before it computes
the softmax weights of the current ones, so the tensor cores are busy while exponentials are computed. Written in Gluon,
since Triton's compiler does not specialize warps on these GPUs.

Tensor dimensions are powers of two. Heads of 96 and 80 elements are cut into two slabs of columns, 64 + 32 and 64 + 16:
scores are the sum of both slabs' gemms, and each slab of the output has its own accumulator. Padding with zeros would
take less code (TMA fills them in), but the work and shared memory of 128 columns: 1.33 and 1.6 times as much. Heads of
64, 128 and 256 are one slab.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_hopper_load import (
    BLOCK_M,
    CHUNKS,
    allocate,
    first_seen,
    item_of,
    key_range,
    load_cache,
    tile_of,
)
from quire.kernels.triton.attention_hopper_query import packed_rows, take_queries, take_rotated_queries
from quire.kernels.triton.launch import num_processors
from quire.kernels.triton.rotary import QueryRotary

_LAYOUTS = {width: gl.NVMMASharedLayout(2 * width, 16, 2) for width in (16, 32, 64)}  # by the width of a TMA box row
LOG2_E = gl.constexpr(1.4426950408889634)
EMPTY = gl.constexpr(-1.0e38)


def hopper_prefill(
    query: Tensor,  # [tokens, query heads, dim]
    key_cache: Tensor,  # [blocks, kv heads, block, dim]
    value_cache: Tensor,
    tables: Tensor,  # [table rows, max blocks], int32
    tiles: Tensor,  # of `lay_out_tiles`, on the device
    rule: AttentionRule,
    out: Tensor,
    *,
    rotary: QueryRotary | None = None,
    dependent: bool,
) -> None:
    """Prefill attention as `paged_prefill`, for the inputs that `fits_hopper` accepts, and those of `rotary` that
    `rotates_queries` accepts."""
    _, query_heads, dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    block_n = 64 if dim > 128 else 128
    page, items = min(block_size, block_n), tiles.shape[0] * kv_heads
    keys, more_keys = _rows_of(key_cache, page)
    values, more_values = _rows_of(value_cache, page)
    _hopper_prefill[(min(items, num_processors(query.device)),)](
        query, _loaded_with(query, rotary), out, keys, values, more_keys, more_values, tables, tiles,
        query if rule.sinks is None else rule.sinks, items, query.stride(0), out.stride(0), tables.stride(0),
        key_cache.stride(0) // dim, block_size, rule.factor, rule.softcap or 1.0, rule.window or 0, rule.value_scale,
        GROUP=query_heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_N=block_n, STAGES=2, SINKS=rule.sinks is not None, CAPPED=rule.softcap is not None,
        WINDOWED=0 if rule.window is None else CHUNKS if rule.is_chunked else 1,
        ROTATED=0 if rotary is None else rotary.num_rotated // 2, DEPENDENT=dependent, num_warps=4,
        launch_pdl=dependent,
    )  # fmt: skip


def _loaded_with(query: Tensor, rotary: QueryRotary | None) -> tuple[Any, ...]:
    """Return the argument `rotary` of `take_rotated_queries`; empty if queries are loaded as they are."""
    if rotary is None or (rotary.table is None and rotary.norms is None):
        return ()
    norm = () if rotary.norms is None else (rotary.norms.query, rotary.norms.eps)
    return query if rotary.table is None else rotary.table, norm, () if rotary.lines is None else (rotary.lines,)


def _rows_of(cache: Tensor, page: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return TMA descriptors of the cache as rows of one head and token, copied `page` rows at a time: one 64 elements
    wide, and one as wide as the second slab, or None if there is none."""
    blocks, heads, block_size, dim = cache.shape
    rows = (blocks - 1) * (cache.stride(0) // dim) + heads * block_size

    def boxes(width: int) -> TensorDescriptor:
        return TensorDescriptor(cache, [rows, dim], [dim, 1], [page, width], _LAYOUTS[width])

    return boxes(64), boxes(dim % 64) if dim % 64 else None


@gluon.jit
def _weigh(
    s, top, total, place, first, lowest, highest, factor, cap, window, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Online softmax step: return the weights of a tile's scores, the rescale factor of earlier results, and the new
    maximum and sum."""
    unit = factor
    if CAPPED:
        s = 1.0 - 2.0 / (gl.exp2(s * (factor * 2.0 / cap)) + 1.0)
        unit = cap * LOG2_E
    masked = first + BLOCK_N > lowest + 1
    if WINDOWED:
        masked = masked | (first < first_seen(highest, window, WINDOWED))
    if masked:
        seen = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        visible = seen[None, :] <= place[:, None]
        if WINDOWED:
            visible = visible & (seen[None, :] >= first_seen(place, window, WINDOWED)[:, None])
        s = gl.where(visible, s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, 1) * unit)
    weights = gl.exp2(s * unit - higher[:, None])
    fade = gl.exp2(top - higher)
    return weights, fade, higher, total * fade + gl.sum(weights, 1)


@gluon.jit
def _write(
    acc, top, total, out, stride, sinks, begin, count, first, head, value_scale, COLUMN: gl.constexpr,
    DIM: gl.constexpr, GROUP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Normalize a slab of the output of packed rows from `first` on, add the sink if there is one, and store it."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    OUTPUT: gl.constexpr = acc.type.layout
    acc *= value_scale
    top = gl.convert_layout(top, gl.SliceLayout(1, OUTPUT))
    total = gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))
    if SINKS:
        heads = head * GROUP + (first + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))) % GROUP
        sink = gl.load(sinks + heads).to(gl.float32) * LOG2_E
        higher = gl.maximum(top, sink)
        acc *= gl.exp2(top - higher)[:, None]
        total = total * gl.exp2(top - higher) + gl.exp2(sink - higher)
    total = gl.where(total == 0.0, 1.0, total)  # a padding row may have seen no keys
    answer = gl.convert_layout((acc / total[:, None]).to(out.dtype.element_ty), LOADS)
    places, real = packed_rows(out, stride, begin, count, first, head, COLUMN, ROWS, DIM, GROUP, LOADS, WIDTH)
    gl.store(places, answer, mask=real)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, query, rotary, out, sinks, tiles, items, programs, query_stride, out_stride, factor, cap,
    window, value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full, v_empty, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    SINKS: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """The code of one compute warp group: half of the rows of each of this program's items."""
    ROWS: gl.constexpr = BLOCK_M // 2
    q_mine = ()
    for i in gl.static_range(len(q_memory)):
        q_mine += (q_memory[i].index(HALF),)  # type: ignore[assignment]
    done = 0  # tiles of keys consumed so far, which gives the pipeline stage and phase
    for turn in range((items + programs - 1) // programs):
        item = item_of(turn, programs)
        if item < items:
            begin, start, count, _row, first_row, head = tile_of(tiles, item, KV_HEADS)
            if count > 0:
                lowest, highest, begin_at = key_range(start, count, first_row, window, GROUP, PAGE, WINDOWED)
                first_row += HALF * ROWS
                if len(rotary) == 0:
                    for i in gl.static_range(len(q_mine)):
                        take_queries(q_mine[i], query, query_stride, begin, count, first_row, head, 64 * i, DIM, GROUP)
                else:
                    take_rotated_queries(
                        q_mine, query, query_stride, begin, start, count, first_row, head, rotary, ROTATED, DIM, GROUP
                    )
                fence_async_shared()
                acc, top, total, done = _attend(
                    done, q_mine, start, first_row, begin_at, lowest, highest, factor, cap, window, k_memory, v_memory,
                    k_full, k_empty, v_full, v_empty, ROWS, BLOCK_N, STAGES, GROUP, CAPPED, WINDOWED,
                )  # fmt: skip
                for i in gl.static_range(len(acc)):
                    _write(
                        acc[i], top, total, out, out_stride, sinks, begin, count, first_row, head, value_scale, 64 * i,
                        DIM, GROUP, SINKS,
                    )  # fmt: skip


@gluon.jit
def _ask_for_scores(query, keys, stage, none):
    """Issue the async score gemm of queries and a tile of keys: the sum over the slabs."""
    s = warpgroup_mma(query[0], keys[0].index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(query)):
        s = warpgroup_mma(query[i], keys[i].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _ask_for_output(acc, weights, values, stage):
    """Issue the async gemm weights x values for each slab of the output, one wgmma group each."""
    sums = ()
    for i in gl.static_range(len(acc)):
        p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc[i].type.layout, 2))  # same registers for all slabs
        sums += (warpgroup_mma(p, values[i].index(stage), acc[i], is_async=True),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _wait_for_output(acc, weights):
    """Wait for all async gemms. Returns the slabs of the output, and the weights, whose registers were in use until
    now."""
    if len(acc) == 1:
        one, weights = warpgroup_mma_wait(0, deps=[acc[0], weights])
        return (one,), weights
    else:  # Triton compiles the code after a return too
        one, two, weights = warpgroup_mma_wait(0, deps=[acc[0], acc[1], weights])
        return (one, two), weights


@gluon.jit
def _attend(
    done, query, start, first_row, begin_at, lowest, highest, factor, cap, window, k_memory, v_memory, k_full, k_empty,
    v_full, v_empty, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Attend packed rows from `first_row` on to their tiles of keys, last tile first. Returns output, maximum exponent,
    sum, and the updated `done`.

    The score gemm of a tile overlaps the output gemm of the one before, and both overlap the softmax of the scores.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    place = start + (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // GROUP
    top = gl.full([ROWS], EMPTY, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    none = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    acc = (_zeros(ROWS, query[0].shape[1]),)
    for i in gl.static_range(1, len(query)):
        acc += (_zeros(ROWS, query[i].shape[1]),)  # type: ignore[assignment]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    number = (highest - begin_at + BLOCK_N) // BLOCK_N
    last = begin_at + (number - 1) * BLOCK_N

    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    s = warpgroup_mma_wait(0, deps=[_ask_for_scores(query, k_memory, stage, none)])
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, fade, top, total = _weigh(
        s, top, total, place, last, lowest, highest, factor, cap, window, BLOCK_N, SCORES, CAPPED, WINDOWED
    )
    p = gl.convert_layout(weights.to(query[0].dtype), WEIGHTS)
    for i in range(1, number):
        before, phase = done % STAGES, (done // STAGES) & 1
        done += 1
        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        s_next = _ask_for_scores(query, k_memory, stage, none)
        mbarrier.wait(v_full.index(before), phase)
        acc_next = _ask_for_output(acc, p, v_memory, before)
        s = warpgroup_mma_wait(len(acc_next), deps=[s_next])  # all but the output gemms
        mbarrier.arrive(k_empty.index(stage), count=1)
        first = last - i * BLOCK_N
        weights, fade, top, total = _weigh(
            s, top, total, place, first, lowest, highest, factor, cap, window, BLOCK_N, SCORES, CAPPED, WINDOWED
        )
        acc_done, p = _wait_for_output(acc_next, p)
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = _faded(acc_done, fade)
        p = gl.convert_layout(weights.to(query[0].dtype), WEIGHTS)
    stage = done % STAGES
    mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
    acc_next = _ask_for_output(acc, p, v_memory, stage)
    acc, p = _wait_for_output(acc_next, p)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, top, total, done + 1


@gluon.jit
def _zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))


@gluon.jit
def _faded(acc, fade):
    """Multiply every slab of the output by `fade`."""
    slabs = ()
    for i in gl.static_range(len(acc)):
        slabs += (acc[i] * gl.convert_layout(fade, gl.SliceLayout(1, acc[i].type.layout))[:, None],)  # type: ignore[assignment]
    return slabs


@gluon.jit
def _hopper_prefill(
    query, rotary, out, keys, values, more_keys, more_values, tables, tiles, sinks, items, query_stride, out_stride,
    table_stride, page_rows, head_rows, factor, cap, window, value_scale, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr, ROTATED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Prefill attention. An item is a tile of packed query rows with one kv head; programs are persistent and take
    several items in turn."""
    PAGE: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    dtype: gl.constexpr = keys.dtype
    programs = gl.num_programs(0)
    key_slabs = (keys,) if DIM % 64 == 0 else (keys, more_keys)
    value_slabs = (values,) if DIM % 64 == 0 else (values, more_values)
    _q_pages, q_memory = allocate(dtype, 2, BLOCK_M // 2, BLOCK_M // 2, DIM)
    k_pages, k_memory = allocate(dtype, STAGES, BLOCK_N, PAGE, DIM)
    v_pages, v_memory = allocate(dtype, STAGES, BLOCK_N, PAGE, DIM)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_last = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(v_last, count=1)
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), query, rotary, out, sinks, tiles, items, programs, query_stride, out_stride,
                         factor, cap, window, value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full,
                         v_empty, BLOCK_N, PAGE, DIM, STAGES, GROUP, KV_HEADS, SINKS, CAPPED, WINDOWED, ROTATED)),
            (_multiply, (gl.constexpr(1), query, rotary, out, sinks, tiles, items, programs, query_stride, out_stride,
                         factor, cap, window, value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full,
                         v_empty, BLOCK_N, PAGE, DIM, STAGES, GROUP, KV_HEADS, SINKS, CAPPED, WINDOWED, ROTATED)),
            (load_cache, (key_slabs, value_slabs, tables, tiles, items, programs, table_stride, page_rows, head_rows,
                          window, k_pages, v_pages, k_full, k_empty, v_full, v_empty, v_last, BLOCK_N, PAGE, DIM,
                          BLOCK_SIZE, STAGES, GROUP, KV_HEADS, WINDOWED)),
        ],
        [4, 1],
        [240, 24] if DIM % 64 == 0 else [232, 40],  # registers per thread: two slabs need more to load
    )  # fmt: skip
