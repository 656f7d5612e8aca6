"""How `attention_hopper` brings packed query rows to shared memory: as they are, or normed and rotated on the way.

Queries that are rotated here need not be read and written by the rotary kernel before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def packed_rows(
    pointer, stride, begin, count, first, head, column, ROWS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr,
    LAYOUT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Return the addresses of WIDTH columns of packed rows first .. first + ROWS, and a mask of the rows that exist."""
    packed = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    places = (begin + packed // GROUP).to(gl.int64) * stride + (head * GROUP + packed % GROUP) * DIM
    return pointer + places[:, None] + columns[None, :], (packed < count * GROUP)[:, None]


@gluon.jit
def take_queries(
    memory, query, stride, begin, count, first, head, COLUMN: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Copy a slab of packed query rows from `first` on to shared memory; rows that do not exist become zeros."""
    ROWS: gl.constexpr = memory.shape[0]
    WIDTH: gl.constexpr = memory.shape[1]
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    places, real = packed_rows(query, stride, begin, count, first, head, COLUMN, ROWS, DIM, GROUP, LOADS, WIDTH)
    memory.store(gl.load(places, mask=real, other=0.0))


@gluon.constexpr_function
def _pairs_at_once(half, rotated):
    """Return the largest power of two that divides both the number of pairs of a head and that of its pairs that
    rotate."""
    return (half | rotated) & -(half | rotated)


@gluon.constexpr_function
def _first_column(pair, rotated):
    """Return the first element of a pair of a head. The pairs that rotate come first."""
    return pair if pair < rotated else pair + rotated


@gluon.constexpr_function
def _second_column(pair, rotated, half):
    return pair + (rotated if pair < rotated else half)


@gluon.jit
def take_rotated_queries(
    memory, query, stride, begin, start, count, first, head, rotary, ROTATED: gl.constexpr, DIM: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Norm and rotate packed query rows from `first` on, and store them to the slabs of shared memory. Results are
    those of `_rotary_kernel` to the last bit, but for norms of heads in several parts, which add squares in another
    order.

    `rotary`: the angles; weights and eps of the norm, or nothing; the line of angles of each token of the batch, or
    nothing if it is the position. ROTATED: the number of pairs of a head that rotate. A part is as many pairs as have
    their first elements side by side, and their second elements, too: a whole head of 64, 128 or 256 elements.
    """
    HALF: gl.constexpr = DIM // 2
    PAIRS: gl.constexpr = _pairs_at_once(HALF, ROTATED)
    ROWS: gl.constexpr = memory[0].shape[0]
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PAIRS, PAIRS // 8], [4, 1], [1, 0])
    angles, norm, lines = rotary
    token = (first + gl.arange(0, ROWS, gl.SliceLayout(1, LOADS))) // GROUP
    line = start + token
    if len(lines) > 0:
        line = gl.load(lines[0] + begin + token, mask=token < count, other=0)
    columns = gl.arange(0, PAIRS, gl.SliceLayout(0, LOADS))[None, :]
    angle = (angles + line.to(gl.int64) * (2 * ROTATED))[:, None] + columns
    places, real = packed_rows(query, stride, begin, count, first, head, 0, ROWS, DIM, GROUP, LOADS, PAIRS)
    parts = ()
    for pair in gl.static_range(0, HALF, PAIRS):
        parts += (_load_pairs(places, angle, real, pair, ROTATED, HALF),)  # type: ignore[assignment]
    if len(norm) > 0:
        square = _sum_of_squares(parts[0])  # type: ignore[misc]
        for i in gl.static_range(1, len(parts)):
            square += _sum_of_squares(parts[i])
        norm = (norm[0], gl.rsqrt(square / DIM + norm[1])[:, None])
    for i in gl.static_range(len(parts)):
        _store_pairs(memory, parts[i], norm, i * PAIRS, ROTATED, HALF)


@gluon.jit
def _load_pairs(places, angle, real, PAIR: gl.constexpr, ROTATED: gl.constexpr, HALF: gl.constexpr):
    """Load both elements of pairs from PAIR on of each row, then cos and sin of their angles if they rotate."""
    first = gl.load(places + _first_column(PAIR, ROTATED), mask=real, other=0.0)
    second = gl.load(places + _second_column(PAIR, ROTATED, HALF), mask=real, other=0.0)
    if PAIR < ROTATED:
        cos = gl.load(angle + PAIR, mask=real, other=0.0)
        sin = gl.load(angle + (ROTATED + PAIR), mask=real, other=0.0)
        return first, second, cos, sin
    else:  # Triton compiles the code after a return too
        return first, second


@gluon.jit
def _sum_of_squares(pairs):
    first, second = pairs[0].to(gl.float32), pairs[1].to(gl.float32)
    return gl.sum(first * first, 1) + gl.sum(second * second, 1)


@gluon.jit
def _store_pairs(memory, pairs, norm, PAIR: gl.constexpr, ROTATED: gl.constexpr, HALF: gl.constexpr):
    """Norm pairs from PAIR on of each row, rotate them if they rotate, and store them. norm: weights and inverse root
    mean square of the rows, or empty."""
    FIRST: gl.constexpr = _first_column(PAIR, ROTATED)
    SECOND: gl.constexpr = _second_column(PAIR, ROTATED, HALF)
    first, second = pairs[0], pairs[1]
    if len(norm) > 0:
        first, second = _normed(first, norm[1], norm[0] + FIRST), _normed(second, norm[1], norm[0] + SECOND)
    if PAIR < ROTATED:
        wide_1, wide_2 = first.to(gl.float32), second.to(gl.float32)
        cos, sin = pairs[2].to(gl.float32), pairs[3].to(gl.float32)
        first, second = (wide_1 * cos - wide_2 * sin).to(first.dtype), (wide_2 * cos + wide_1 * sin).to(first.dtype)
    _columns(memory, FIRST, first.shape[1]).store(first)
    _columns(memory, SECOND, first.shape[1]).store(second)


@gluon.jit
def _normed(x, inverse, weights):
    """Multiply rows by their inverse root mean square, and columns by the weights from this address on."""
    weight = gl.load(weights + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))).to(gl.float32)
    return ((x.to(gl.float32) * inverse).to(x.dtype).to(gl.float32) * weight[None, :]).to(x.dtype)


@gluon.jit
def _columns(memory, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Return the view of WIDTH columns of a head, which lie in one slab."""
    SLAB: gl.constexpr = min(COLUMN // 64, len(memory) - 1)
    return memory[SLAB].slice(COLUMN - 64 * SLAB, WIDTH, dim=1)
