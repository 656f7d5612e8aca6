"""The loading warp of `attention_hopper`: copies keys and values from the cache to shared memory by TMA, slab by
slab."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

BLOCK_M = gl.constexpr(128)  # packed query rows of a tile
CHUNKS = gl.constexpr(2)  # value of WINDOWED: windows are chunks of the text; 1: they slide; 0: there are none


@gluon.jit
def tile_of(tiles, item, KV_HEADS: gl.constexpr):
    """Return the fields of an item's tile record, and its kv head."""
    record = tiles + item // KV_HEADS * 8
    begin, start, count = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    return begin, start, count, gl.load(record + 3), gl.load(record + 4), item % KV_HEADS


@gluon.jit
def first_seen(place, window, WINDOWED: gl.constexpr):
    """Return the first position that a token at position `place` sees, if the sequence is long enough."""
    return place // window * window if WINDOWED == CHUNKS else place + 1 - window


@gluon.jit
def key_range(start, count, first_row, window, GROUP: gl.constexpr, PAGE: gl.constexpr, WINDOWED: gl.constexpr):
    """Return the first and last position of the tile's rows, and the position where its keys begin."""
    lowest = start + first_row // GROUP
    highest = start + gl.minimum((first_row + BLOCK_M - 1) // GROUP, count - 1)
    begin_at = 0
    if WINDOWED:
        begin_at = gl.maximum(first_seen(lowest, window, WINDOWED), 0) // PAGE * PAGE
    return lowest, highest, begin_at


@gluon.jit
def item_of(turn, programs):
    """Return the item of this program in its `turn`: heavy items come first, so every second turn runs in reverse order
    to balance the load."""
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def allocate(
    dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Allocate shared memory for STAGES matrices of ROWS rows of queries, keys or values, one buffer per slab. Returns
    it viewed as TMA boxes of PAGE rows, and as matrices."""
    pages, matrices = _allocate_slab(dtype, STAGES, ROWS, PAGE, DIM // 64 * 64)
    if DIM % 64 == 0:
        return (pages,), (matrices,)
    else:  # Triton compiles the code after a return too
        more_pages, more_matrices = _allocate_slab(dtype, STAGES, ROWS, PAGE, DIM % 64)
        return (pages, more_pages), (matrices, more_matrices)


@gluon.jit
def _allocate_slab(
    dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, PAGE: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    BOX: gl.constexpr = min(WIDTH, 64)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * BOX, 16, 2)
    pages = gl.allocate_shared_memory(dtype, [STAGES * (ROWS // PAGE) * (WIDTH // BOX), PAGE, BOX], LAYOUT)
    return pages, pages._reinterpret(dtype, [STAGES, ROWS, WIDTH], LAYOUT)


@gluon.jit
def _load_pages(
    caches, table, first, limit, head_row, page_rows, buffers, stage, full, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy keys first .. first + BLOCK_N to a stage of each slab's buffers by TMA; signals the barrier `full`."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.expect(full, BLOCK_N * DIM * 2)
    for p in gl.static_range(PAGES):
        place = gl.minimum(first + p * PAGE, limit - 1)
        row = gl.load(table + place // BLOCK_SIZE) * page_rows + head_row
        if BLOCK_SIZE > PAGE:
            row += (first + p * PAGE) % BLOCK_SIZE
        for c in gl.static_range(DIM // 64):
            buffer = buffers[0].index(stage * (PAGES * (DIM // 64)) + c * PAGES + p)
            tma.async_copy_global_to_shared(caches[0], [row, c * 64], full, buffer)
        if DIM % 64 > 0:
            tma.async_copy_global_to_shared(caches[1], [row, 64], full, buffers[1].index(stage * PAGES + p))


@gluon.jit
def _clear_pages(first, limit, buffers, stage, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Zero the rows from `limit` on: they were never written and may contain NaN."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    for p in range((limit - first) // PAGE, PAGES):
        for c in gl.static_range(DIM // 64):
            _clear_rows(first + p * PAGE, limit, buffers[0].index(stage * (PAGES * (DIM // 64)) + c * PAGES + p))
        if DIM % 64 > 0:
            _clear_rows(first + p * PAGE, limit, buffers[1].index(stage * PAGES + p))
    fence_async_shared()


@gluon.jit
def _clear_rows(first, limit, buffer):
    WIDTH: gl.constexpr = buffer.shape[1]
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    real = first + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LANES)) < limit
    buffer.store(gl.where(real[:, None], buffer.load(LANES), 0.0).to(buffer.dtype))


@gluon.jit
def load_cache(
    keys, values, tables, tiles, items, programs, table_stride, page_rows, head_rows, window, k_pages, v_pages,
    k_full, k_empty, v_full, v_empty, v_last, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """The code of the loading warp: keys and values of all this program's items, from the last keys to the first."""
    done = 0
    cleared = 0
    for turn in range((items + programs - 1) // programs):
        item = item_of(turn, programs)
        if item < items:
            _begin, start, count, row, first_row, head = tile_of(tiles, item, KV_HEADS)
            if count > 0:
                _lowest, highest, begin_at = key_range(start, count, first_row, window, GROUP, PAGE, WINDOWED)
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
                        keys, table, first, limit, head_row, page_rows, k_pages, stage, k_full.index(stage),
                        BLOCK_N, PAGE, DIM, BLOCK_SIZE,
                    )  # fmt: skip
                    mbarrier.wait(v_empty.index(stage), free)
                    if first + BLOCK_N > limit:
                        _load_pages(
                            values, table, first, limit, head_row, page_rows, v_pages, stage, v_last, BLOCK_N,
                            PAGE, DIM, BLOCK_SIZE,
                        )  # fmt: skip
                        mbarrier.wait(v_last, cleared & 1)
                        _clear_pages(first, limit, v_pages, stage, BLOCK_N, PAGE, DIM)
                        mbarrier.arrive(v_full.index(stage), count=1)
                        cleared += 1
                    else:
                        _load_pages(
                            values, table, first, limit, head_row, page_rows, v_pages, stage,
                            v_full.index(stage), BLOCK_N, PAGE, DIM, BLOCK_SIZE,
                        )  # fmt: skip
                    done += 1
