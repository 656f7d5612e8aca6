"""The work list of split attention: made on the device once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_config import SplitConfig, split_config
from quire.kernels.triton.attention_split import base_of
from quire.kernels.triton.launch import num_processors

PROGRAM_NUMBERS = 9  # unit, tile in the unit, tiles, low, high, table row, tiles of all, programs with work, place
UNIT_NUMBERS = 4  # low, high, table row, unit
_COMPARED_AT_ONCE = 2048  # borders of programs against ends of units


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Shares of work and the memory in which split attention leaves parts. Holds one step at a time.

    `arrivals` is zero between launches: the program that merges a pair clears its count.
    """

    config: SplitConfig
    kv_heads: int
    block_size: int
    programs: Tensor  # [programs, PROGRAM_NUMBERS], int32
    units: Tensor  # [units, UNIT_NUMBERS], int32: those that are not empty, in order
    arrivals: Tensor  # [units * kv heads], int32
    parts: Tensor  # [2 * programs, rows, dim], float32
    extremes: Tensor  # [2 * programs, 2, rows], float32: maximum exponent, sum


def allocate_split_plan(
    key_cache: Tensor, query_heads: int, max_units: int, *, rows: int | None = None, config: SplitConfig | None = None
) -> SplitPlan:
    """Memory for plans of up to `max_units` units over caches like `key_cache`.

    `rows` is how many packed query rows a unit has at most: those of one token by default.
    """
    _, kv_heads, block_size, dim = key_cache.shape
    rows = rows or query_heads // kv_heads
    device = key_cache.device
    config = config or split_config(rows, dim, key_cache.dtype, device, max_units * kv_heads)
    if rows > config.block_m:
        raise ValueError(f"{rows} query heads share a key/value head, but a unit holds at most {config.block_m}")
    return SplitPlan(
        config=config,
        kv_heads=kv_heads,
        block_size=block_size,
        programs=torch.zeros(config.programs, PROGRAM_NUMBERS, dtype=torch.int32, device=device),
        units=torch.zeros(max_units, UNIT_NUMBERS, dtype=torch.int32, device=device),
        arrivals=torch.zeros(max_units * kv_heads, dtype=torch.int32, device=device),
        parts=torch.empty(2 * config.programs, rows, dim, dtype=torch.float32, device=device),
        extremes=torch.empty(2 * config.programs, 2, rows, dtype=torch.float32, device=device),
    )


def with_config(plan: SplitPlan, config: SplitConfig) -> SplitPlan:
    """The same memory, run another way; `plan` is of at least as many programs. Only one of them holds a step."""
    count = config.programs
    if count > plan.config.programs or config.block_m < plan.parts.shape[1]:
        raise ValueError(f"a plan of {plan.config.programs} programs has no room for {config}")
    programs, parts, extremes = plan.programs[:count], plan.parts[: 2 * count], plan.extremes[: 2 * count]
    return replace(plan, config=config, programs=programs, parts=parts, extremes=extremes)


def with_own_lists(plan: SplitPlan) -> SplitPlan:
    """A plan that holds a step beside this one; both leave parts in the same memory, one launch after the other."""
    return replace(plan, programs=torch.zeros_like(plan.programs), units=torch.zeros_like(plan.units))


def fill_split_plan(
    plan: SplitPlan,
    lengths: Tensor,  # [units], int32 or int64: positions end before it; 0: the unit is padding
    *,
    begins: Tensor | None = None,  # [units]: positions start there, below the length; 0 by default
    table_rows: Tensor | None = None,  # [units]: whose block table; the unit's own number by default
    window: int | None = None,  # only the last `window` positions
) -> None:
    """Share the units' tiles out to the programs. One launch, nothing read by the host."""
    count = lengths.shape[0]
    room = plan.units.shape[0]
    if count > room:
        raise ValueError(f"{count} units, but the plan has room for {room}")
    padded = triton.next_power_of_2(count)
    at_once = max(1, min(32, _COMPARED_AT_ONCE // padded))
    num_programs, processors = plan.programs.shape[0], num_processors(lengths.device)
    _share_out[(triton.cdiv(num_programs, at_once),)](
        lengths, begins, table_rows, plan.units, plan.programs, count, num_programs, processors,
        plan.config.least_tiles, plan.config.merge_tiles, window,
        RECORD=PROGRAM_NUMBERS, KV_HEADS=plan.kv_heads, BLOCK_N=plan.config.block_n, BLOCK_SIZE=plan.block_size,
        UNITS_PAD=padded, AT_ONCE=at_once, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_units", "num_programs", "processors", "least_tiles", "merge_tiles"])
def _share_out(
    lengths, begins, table_rows, units, programs, num_units, num_programs, processors, least_tiles, merge_tiles, window,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNITS_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each launched block counts all tiles and writes AT_ONCE programs; the first one writes the units too."""
    unit = tl.arange(0, UNITS_PAD)
    low, high, row = _read_units(lengths, begins, table_rows, unit, num_units, window)
    tiles = tl.where(high > low, tl.cdiv(high - base_of(low, BLOCK_N, BLOCK_SIZE), BLOCK_N), 0)
    width = tiles * KV_HEADS
    end = tl.cumsum(width, 0)
    total = tl.sum(width, 0)
    if tl.program_id(0) == 0:
        place = tl.cumsum((tiles > 0).to(tl.int32), 0) - 1
        tl.store(units + place * 4, low, mask=tiles > 0)
        tl.store(units + place * 4 + 1, high, mask=tiles > 0)
        tl.store(units + place * 4 + 2, row, mask=tiles > 0)
        tl.store(units + place * 4 + 3, unit, mask=tiles > 0)

    program = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    pairs = tl.sum((tiles > 0).to(tl.int32), 0) * KV_HEADS
    active = _active(total, pairs, num_programs, processors, least_tiles, merge_tiles)
    start = (program.to(tl.int64) * total // active).to(tl.int32)
    stop = ((program + 1).to(tl.int64) * total // active).to(tl.int32)
    before = end[None, :] <= start[:, None]  # [AT_ONCE, UNITS_PAD]
    first = tl.sum(before.to(tl.int32), 1)
    offset = start - tl.sum(tl.where(before, width[None, :], 0), 1)
    low, high, row = _read_units(lengths, begins, table_rows, first, num_units, window)
    place = tl.sum((before & (tiles > 0)[None, :]).to(tl.int32), 1)
    record = programs + program * RECORD
    kept = program < num_programs
    tl.store(record, first, mask=kept)
    tl.store(record + 1, offset, mask=kept)
    tl.store(record + 2, tl.where(program < active, stop - start, 0), mask=kept)
    tl.store(record + 3, low, mask=kept)
    tl.store(record + 4, high, mask=kept)
    tl.store(record + 5, row, mask=kept)
    tl.store(record + 6, tl.zeros_like(first) + total, mask=kept)
    tl.store(record + 7, tl.zeros_like(first) + active, mask=kept)
    tl.store(record + 8, place, mask=kept)


@triton.jit
def _active(total, pairs, num_programs, processors, least_tiles, merge_tiles):
    """How many programs to share `total` tiles of `pairs` (unit, head) pairs out to.

    Either as many as are useful, shares below `least_tiles` being not; or the same whole number for every pair, so that
    pairs of one length are never cut across, and with one program each not at all. Whichever ends first: programs of
    one processor share what it can read, and a cut costs each of them as much as `merge_tiles` tiles.
    """
    pairs = tl.maximum(pairs, 1)
    useful = tl.maximum(tl.minimum(num_programs, total // least_tiles), 1)
    even = tl.maximum(useful // pairs, 1) * pairs
    if even > num_programs:
        found = num_programs
    else:
        if_even = tl.cdiv(even, processors) * (tl.cdiv(total, even) + tl.where(even > pairs, merge_tiles, 0))
        if_cut = tl.cdiv(useful, processors) * (tl.cdiv(total, useful) + merge_tiles)
        found = tl.where(if_even <= if_cut, even, useful)
    return found


@triton.jit
def _read_units(lengths, begins, table_rows, unit, num_units, window):
    """First position, end and table row of each of `unit`; nothing where there is no such unit."""
    real = unit < num_units
    high = tl.load(lengths + unit, mask=real, other=0).to(tl.int32)
    low = tl.zeros_like(high)
    if begins is not None:
        low = tl.load(begins + unit, mask=real, other=0).to(tl.int32)
    if window is not None:
        low = tl.maximum(low, high - window)
    row = unit
    if table_rows is not None:
        row = tl.load(table_rows + unit, mask=real, other=0).to(tl.int32)
    return tl.minimum(low, high), high, row
