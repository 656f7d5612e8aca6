"""Paged attention of prompt chunks on Hopper GPUs: one warp loads keys and values, two warp groups multiply.

The same tiles as in `attention_prefill`. The loading warp copies each block of the cache by the tensor memory
accelerator, a few tiles of keys ahead. Each warp group has half of a tile's rows: it asks for the scores of the next
keys before it weighs the present ones, so that the tensor cores work while exponents are computed.
Written in Gluon, because Triton's compiler does not give warps different work on these GPUs.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.launch import num_processors

_BLOCK_M = gl.constexpr(128)  # packed query rows of a tile
_SLABS = gl.NVMMASharedLayout(128, 16, 2)
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
    dependent: bool,
) -> None:
    """What `paged_prefill` does; `fits_hopper` says for what."""
    _, query_heads, dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    block_n = 64 if dim > 128 else 128
    page, items = min(block_size, block_n), tiles.shape[0] * kv_heads
    _hopper_prefill[(min(items, num_processors(query.device)),)](
        query, out, _rows_of(key_cache, page), _rows_of(value_cache, page), tables, tiles,
        query if rule.sinks is None else rule.sinks, items, query.stride(0), out.stride(0), tables.stride(0),
        key_cache.stride(0) // dim, block_size, rule.factor, rule.softcap or 1.0, rule.window or 0, rule.value_scale,
        GROUP=query_heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_N=block_n, STAGES=2, SINKS=rule.sinks is not None, CAPPED=rule.softcap is not None,
        WINDOWED=rule.window is not None, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip


def _rows_of(cache: Tensor, page: int) -> TensorDescriptor:
    """The cache as rows of one head and token each, which are copied `page` at a time and 64 numbers wide."""
    blocks, heads, block_size, dim = cache.shape
    rows = (blocks - 1) * (cache.stride(0) // dim) + heads * block_size
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [page, 64], _SLABS)


@gluon.jit
def _tile(tiles, item, KV_HEADS: gl.constexpr):
    """The numbers of the item's tile, and its key/value head."""
    record = tiles + item // KV_HEADS * 8
    begin, start, count = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    return begin, start, count, gl.load(record + 3), gl.load(record + 4), item % KV_HEADS


@gluon.jit
def _keys(start, count, first_row, window, GROUP: gl.constexpr, PAGE: gl.constexpr, WINDOWED: gl.constexpr):
    """The first and last position of the tile's rows, and where its keys begin."""
    lowest = start + first_row // GROUP
    highest = start + gl.minimum((first_row + _BLOCK_M - 1) // GROUP, count - 1)
    begin_at = 0
    if WINDOWED:
        begin_at = gl.maximum(lowest + 1 - window, 0) // PAGE * PAGE
    return lowest, highest, begin_at


@gluon.jit
def _item(turn, programs):
    """What this program takes in its turn: heavy items come first, so every second turn runs backwards."""
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _load_pages(
    cache, table, first, limit, head_row, page_rows, buffers, base, full, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the rows of the keys first .. first + BLOCK_N into buffers [base ..] of 64 columns; signals `full`."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.expect(full, BLOCK_N * DIM * 2)
    for p in gl.static_range(PAGES):
        place = gl.minimum(first + p * PAGE, limit - 1)
        row = gl.load(table + place // BLOCK_SIZE) * page_rows + head_row
        if BLOCK_SIZE > PAGE:
            row += (first + p * PAGE) % BLOCK_SIZE
        for c in gl.static_range(DIM // 64):
            tma.async_copy_global_to_shared(cache, [row, c * 64], full, buffers.index(base + c * PAGES + p))


@gluon.jit
def _clear_pages(first, limit, buffers, base, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Zeros in place of the rows from `limit` on: nobody has written them, they may be no numbers at all."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, PAGE, gl.SliceLayout(1, LANES))
    for p in range((limit - first) // PAGE, PAGES):
        real = first + p * PAGE + rows < limit
        for c in gl.static_range(DIM // 64):
            buffer = buffers.index(base + c * PAGES + p)
            buffer.store(gl.where(real[:, None], buffer.load(LANES), 0.0).to(buffer.dtype))
    fence_async_shared()


@gluon.jit
def _load(
    keys, values, tables, tiles, items, programs, table_stride, page_rows, head_rows, window, k_pages, v_pages,
    k_full, k_empty, v_full, v_empty, v_last, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """What the loading warp does: keys and values of all this program's items, from the last keys to the first."""
    PARTS: gl.constexpr = BLOCK_N // PAGE * (DIM // 64)
    done = 0
    cleared = 0
    for turn in range((items + programs - 1) // programs):
        item = _item(turn, programs)
        if item < items:
            _begin, start, count, row, first_row, head = _tile(tiles, item, KV_HEADS)
            if count > 0:
                _lowest, highest, begin_at = _keys(start, count, first_row, window, GROUP, PAGE, WINDOWED)
                table = tables + row.to(gl.int64) * table_stride
                head_row = head * head_rows
                limit = start + count
                number = (highest - begin_at + BLOCK_N) // BLOCK_N
                for i in range(number):
                    first = begin_at + (number - 1 - i) * BLOCK_N
                    stage = done % STAGES
                    free = ((done // STAGES) & 1) ^ 1
                    mbarrier.wait(k_empty.index(stage), free)
                    _load_pages(
                        keys, table, first, limit, head_row, page_rows, k_pages, stage * PARTS, k_full.index(stage),
                        BLOCK_N, PAGE, DIM, BLOCK_SIZE,
                    )  # fmt: skip
                    mbarrier.wait(v_empty.index(stage), free)
                    if first + BLOCK_N > limit:
                        _load_pages(
                            values, table, first, limit, head_row, page_rows, v_pages, stage * PARTS, v_last, BLOCK_N,
                            PAGE, DIM, BLOCK_SIZE,
                        )  # fmt: skip
                        mbarrier.wait(v_last, cleared & 1)
                        _clear_pages(first, limit, v_pages, stage * PARTS, BLOCK_N, PAGE, DIM)
                        mbarrier.arrive(v_full.index(stage), count=1)
                        cleared += 1
                    else:
                        _load_pages(
                            values, table, first, limit, head_row, page_rows, v_pages, stage * PARTS,
                            v_full.index(stage), BLOCK_N, PAGE, DIM, BLOCK_SIZE,
                        )  # fmt: skip
                    done += 1


@gluon.jit
def _weigh(
    s, top, total, place, first, lowest, highest, factor, cap, window, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's scores, how what came before fades, and the new maximum and sum."""
    unit = factor
    if CAPPED:
        s = 1.0 - 2.0 / (gl.exp2(s * (factor * 2.0 / cap)) + 1.0)
        unit = cap * LOG2_E
    masked = first + BLOCK_N > lowest + 1
    if WINDOWED:
        masked = masked | (first < highest + 1 - window)
    if masked:
        seen = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        visible = seen[None, :] <= place[:, None]
        if WINDOWED:
            visible = visible & (seen[None, :] > place[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, 1) * unit)
    weights = gl.exp2(s * unit - higher[:, None])
    fade = gl.exp2(top - higher)
    return weights, fade, higher, total * fade + gl.sum(weights, 1)


@gluon.jit
def _rows(
    pointer, stride, begin, count, first, head, ROWS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The addresses of packed rows first .. first + ROWS, and which of them are real."""
    packed = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    places = (begin + packed // GROUP).to(gl.int64) * stride + (head * GROUP + packed % GROUP) * DIM
    return pointer + places[:, None] + columns[None, :], (packed < count * GROUP)[:, None]


@gluon.jit
def _multiply(
    HALF: gl.constexpr, query, out, sinks, tiles, items, programs, query_stride, out_stride, factor, cap, window,
    value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full, v_empty, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    SINKS: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """What a warp group does: one half of the rows of all this program's items."""
    ROWS: gl.constexpr = _BLOCK_M // 2
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_mine = q_memory.index(HALF)
    done = 0  # tiles of keys
    for turn in range((items + programs - 1) // programs):
        item = _item(turn, programs)
        if item < items:
            begin, start, count, _row, first_row, head = _tile(tiles, item, KV_HEADS)
            if count > 0:
                lowest, highest, begin_at = _keys(start, count, first_row, window, GROUP, PAGE, WINDOWED)
                first_row += HALF * ROWS
                places, real = _rows(query, query_stride, begin, count, first_row, head, ROWS, DIM, GROUP, LOADS)
                q_mine.store(gl.load(places, mask=real, other=0.0))
                fence_async_shared()
                acc, top, total, done = _attend(
                    done, q_mine, start, first_row, begin_at, lowest, highest, factor, cap, window, k_memory, v_memory,
                    k_full, k_empty, v_full, v_empty, ROWS, BLOCK_N, DIM, STAGES, GROUP, CAPPED, WINDOWED,
                )  # fmt: skip
                acc *= value_scale
                top = gl.convert_layout(top, gl.SliceLayout(1, OUTPUT))
                total = gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))
                if SINKS:
                    heads = head * GROUP + (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))) % GROUP
                    sink = gl.load(sinks + heads).to(gl.float32) * LOG2_E
                    higher = gl.maximum(top, sink)
                    acc *= gl.exp2(top - higher)[:, None]
                    total = total * gl.exp2(top - higher) + gl.exp2(sink - higher)
                total = gl.where(total == 0.0, 1.0, total)  # a row of padding may have seen nothing
                answer = gl.convert_layout((acc / total[:, None]).to(q_mine.dtype), LOADS)
                places, real = _rows(out, out_stride, begin, count, first_row, head, ROWS, DIM, GROUP, LOADS)
                gl.store(places, answer, mask=real)


@gluon.jit
def _attend(
    done, query, start, first_row, begin_at, lowest, highest, factor, cap, window, k_memory, v_memory, k_full, k_empty,
    v_full, v_empty, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The output, maximum exponent and sum of packed rows from `first_row` on, and `done` after their tiles of keys.

    The scores of a tile and the output of the one before are multiplied at once, while that one's weights are made.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    place = start + (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // GROUP
    top = gl.full([ROWS], EMPTY, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    none = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    acc = gl.full([ROWS, DIM], 0.0, gl.float32, OUTPUT)
    number = (highest - begin_at + BLOCK_N) // BLOCK_N
    last = begin_at + (number - 1) * BLOCK_N

    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    s = warpgroup_mma(query, k_memory.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, fade, top, total = _weigh(
        s, top, total, place, last, lowest, highest, factor, cap, window, BLOCK_N, SCORES, CAPPED, WINDOWED
    )
    p = gl.convert_layout(weights.to(query.dtype), WEIGHTS)
    for i in range(1, number):
        before, phase = done % STAGES, (done // STAGES) & 1
        done += 1
        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        s_next = warpgroup_mma(query, k_memory.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), phase)
        acc_next = warpgroup_mma(p, v_memory.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(stage), count=1)
        first = last - i * BLOCK_N
        weights, fade, top, total = _weigh(
            s, top, total, place, first, lowest, highest, factor, cap, window, BLOCK_N, SCORES, CAPPED, WINDOWED
        )
        acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc *= gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
        p = gl.convert_layout(weights.to(query.dtype), WEIGHTS)
    stage = done % STAGES
    mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
    acc_next = warpgroup_mma(p, v_memory.index(stage), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, top, total, done + 1


@gluon.jit
def _hopper_prefill(
    query, out, keys, values, tables, tiles, sinks, items, query_stride, out_stride, table_stride, page_rows,
    head_rows, factor, cap, window, value_scale, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr,
    CAPPED: gl.constexpr, WINDOWED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Items are tiles of packed query rows, each under every key/value head; a program takes one after the other."""
    PAGE: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    PARTS: gl.constexpr = BLOCK_N // PAGE * (DIM // 64)
    dtype: gl.constexpr = keys.dtype
    PAGES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    programs = gl.num_programs(0)
    q_memory = gl.allocate_shared_memory(dtype, [2, _BLOCK_M // 2, DIM], PAGES)
    k_pages = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PAGE, 64], PAGES)
    v_pages = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PAGE, 64], PAGES)
    k_memory = k_pages._reinterpret(dtype, [STAGES, BLOCK_N, DIM], PAGES)
    v_memory = v_pages._reinterpret(dtype, [STAGES, BLOCK_N, DIM], PAGES)
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
            (_multiply, (gl.constexpr(0), query, out, sinks, tiles, items, programs, query_stride, out_stride, factor,
                         cap, window, value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full, v_empty,
                         BLOCK_N, PAGE, DIM, STAGES, GROUP, KV_HEADS, SINKS, CAPPED, WINDOWED)),
            (_multiply, (gl.constexpr(1), query, out, sinks, tiles, items, programs, query_stride, out_stride, factor,
                         cap, window, value_scale, q_memory, k_memory, v_memory, k_full, k_empty, v_full, v_empty,
                         BLOCK_N, PAGE, DIM, STAGES, GROUP, KV_HEADS, SINKS, CAPPED, WINDOWED)),
            (_load, (keys, values, tables, tiles, items, programs, table_stride, page_rows, head_rows, window, k_pages,
                     v_pages, k_full, k_empty, v_full, v_empty, v_last, BLOCK_N, PAGE, DIM, BLOCK_SIZE, STAGES,
                     GROUP, KV_HEADS, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
