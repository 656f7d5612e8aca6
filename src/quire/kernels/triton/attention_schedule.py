"""The work list of split attention: built on the device once per step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_config import SplitConfig, split_config
from quire.kernels.triton.attention_split import base_of
from quire.kernels.triton.launch import num_processors

PROGRAM_NUMBERS = 9  # fields: unit, tile in the unit, tiles, low, high, table row, tiles of all, active programs, place
UNIT_NUMBERS = 4  # fields: low, high, table row, unit
_COMPARED_AT_ONCE = 2048  # borders of programs compared with ends of units
_UNITS_HELD = (64, 256, 1024)  # numbers of units that a launch is compiled for: one for each bucket would be many


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The work shares of all programs, and the scratch memory for parts. Holds one step at a time.

    `arrivals` is zero between launches: the program that merges a pair resets its counter.
    """

    config: SplitConfig
    kv_heads: int
    block_size: int
    programs: Tensor  # [programs, PROGRAM_NUMBERS], int32
    units: Tensor  # [units, UNIT_NUMBERS], int32: the non-empty units, in order
    arrivals: Tensor  # [units * kv heads], int32
    parts: Tensor  # [2 * programs, rows, dim], float32
    extremes: Tensor  # [2 * programs, 2, rows], float32: maximum exponent, sum


def allocate_split_plan(
    key_cache: Tensor, query_heads: int, max_units: int, *, rows: int | None = None, config: SplitConfig | None = None
) -> SplitPlan:
    """Allocate a plan for up to `max_units` units over caches like `key_cache`.

    `rows` is the largest number of packed query rows of a unit; by default the query heads per kv head.
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
    """Return a plan on the same memory with another config, which must not need more programs. Only one of the two
    plans can hold a step at a time."""
    count = config.programs
    if count > plan.config.programs or config.block_m < plan.parts.shape[1]:
        raise ValueError(f"a plan of {plan.config.programs} programs has no room for {config}")
    programs, parts, extremes = plan.programs[:count], plan.parts[: 2 * count], plan.extremes[: 2 * count]
    return replace(plan, config=config, programs=programs, parts=parts, extremes=extremes)


def with_own_lists(plan: SplitPlan) -> SplitPlan:
    """Return a plan that can hold a step at the same time as this one. Both share the memory for parts, so their
    launches must not overlap."""
    return replace(plan, programs=torch.zeros_like(plan.programs), units=torch.zeros_like(plan.units))


def fill_split_plan(
    plan: SplitPlan,
    lengths: Tensor,  # [units], int32 or int64: end of each unit's positions; 0: padding
    *,
    begins: Tensor | None = None,  # [units]: first position, at most the length; 0 by default
    table_rows: Tensor | None = None,  # [units]: row of the block table; the unit's own index by default
    window: int | None = None,  # only the last `window` positions
    chunked: bool = False,  # only those of the last position's chunk of `window` positions
) -> None:
    """Distribute the units' tiles over the programs. One launch, without a host synchronization."""
    count = lengths.shape[0]
    room = plan.units.shape[0]
    if count > room:
        raise ValueError(f"{count} units, but the plan has room for {room}")
    padded = next((held for held in _UNITS_HELD if count <= held), triton.next_power_of_2(count))
    at_once = max(1, min(32, _COMPARED_AT_ONCE // padded))
    num_programs, processors = plan.programs.shape[0], num_processors(lengths.device)
    _share_out[(triton.cdiv(num_programs, at_once),)](
        lengths, begins, table_rows, plan.units, plan.programs, count, num_programs, processors,
        plan.config.least_tiles, plan.config.merge_tiles, window,
        RECORD=PROGRAM_NUMBERS, KV_HEADS=plan.kv_heads, BLOCK_N=plan.config.block_n, BLOCK_SIZE=plan.block_size,
        UNITS_PAD=padded, AT_ONCE=at_once, CHUNKED=chunked, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_units", "num_programs", "processors", "least_tiles", "merge_tiles"])
def _share_out(
    lengths, begins, table_rows, units, programs, num_units, num_programs, processors, least_tiles, merge_tiles, window,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNITS_PAD: tl.constexpr, AT_ONCE: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Each program of this launch counts all tiles and writes AT_ONCE work shares; the first one also writes the list
    of units."""
    unit = tl.arange(0, UNITS_PAD)
    low, high, row = _read_units(lengths, begins, table_rows, unit, num_units, window, CHUNKED)
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
    low, high, row = _read_units(lengths, begins, table_rows, first, num_units, window, CHUNKED)
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
    """Return over how many programs to distribute `total` tiles of `pairs` (unit, head) pairs.

    Either as many as are useful (shares are at least `least_tiles`), or the same whole number for every pair, so that
    pairs of equal length have no borders inside, and are not cut at all with one program each. Chooses the estimated
    faster one: programs on one multiprocessor share its bandwidth, and a cut costs each of them `merge_tiles` tiles.
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
def _read_units(lengths, begins, table_rows, unit, num_units, window, CHUNKED: tl.constexpr):
    """Load first position, end and table row of each of `unit`; empty where the unit does not exist."""
    real = unit < num_units
    high = tl.load(lengths + unit, mask=real, other=0).to(tl.int32)
    low = tl.zeros_like(high)
    if begins is not None:
        low = tl.load(begins + unit, mask=real, other=0).to(tl.int32)
    if window is not None:
        low = tl.maximum(low, tl.maximum(high - 1, 0) // window * window if CHUNKED else high - window)
    row = unit
    if table_rows is not None:
        row = tl.load(table_rows + unit, mask=real, other=0).to(tl.int32)
    return tl.minimum(low, high), high, row
