"""Samples the next token of every row, capturable in a CUDA graph: greedy or random, appended to the row's tokens on
the device.

A random token is found by inverting the cumulative distribution of integer weights with one counter-based random number
per token. This is the rule of the runtime's torch sampler, so both return the same token wherever exp rounds alike. A
token depends only on the row's own logits, parameters, seed and position, never on the batch. Without filters the
cumulative distribution is in the order of token ids; rows with top_k or top_p go through `sampling_filters` in ranked
order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import sampling_filters, sampling_search
from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two
from quire.kernels.triton.sampling_filters import (
    FilterSpace,
    count_tile,
    draw_filtered,
    is_filtered,
    list_tile,
    lowest_candidate,
    ranked_by_weight,
    sum_tile,
)
from quire.kernels.triton.sampling_weights import (
    COLDEST,
    NOT_FINITE,
    NOTHING_ALLOWED,
    TILE,
    RowParameters,
    RowTokens,
    divided,
    row_best,
    row_mass,
    scaled_logits,
    share_of,
    uniform,
    units,
    weights_of,
)

_TILE_WARPS = 4  # of a program that reads one tile: more tokens per thread need fewer reductions across threads
_ROW_WARPS = 8  # of a program that finishes a row
_SEARCH_WARPS = 16  # of a program that searches candidates
_PART = 512  # tokens of a tile that go to fine bins at a time
_CHUNK = 4096  # tokens of a row with too many candidates that are read at a time


class SampleSpace(NamedTuple):
    """Scratch memory of `sample` for a batch of a fixed size."""

    best: Tensor  # [entries, tiles] float32: highest logit of each tile
    best_id: Tensor  # [entries, tiles] int32: the token with that logit, the lowest of several
    mass: Tensor  # [entries, tiles] int64: sum of the tile's weights
    filters: FilterSpace | None  # None: no row of the batch has top_k or top_p

    @classmethod
    def make(cls, entries: int, vocab_size: int, device: torch.device, *, filtered: bool) -> SampleSpace:
        tiles = triton.cdiv(vocab_size, TILE)
        return cls(
            torch.empty(entries, tiles, dtype=torch.float32, device=device),
            torch.empty(entries, tiles, dtype=torch.int32, device=device),
            torch.empty(entries, tiles, dtype=torch.int64, device=device),
            FilterSpace.make(entries, device) if filtered else None,
        )


@triton.jit
def _best_kernel(
    row_ptr, logits_ptr, best_ptr, best_id_ptr, logits_stride, vocab_size, TILE: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Find the highest logit of a tile. NaN counts as infinity, since both fail the row."""
    entry, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    await_inputs(DEPENDENT)
    if tl.load(row_ptr + entry) >= 0:
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + entry * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        best = tl.max(x)
        tl.store(best_ptr + entry * tiles + tile, best)
        tl.store(best_id_ptr + entry * tiles + tile, tl.min(tl.where(x == best, token, vocab_size)))


@triton.jit
def _weigh_kernel(
    row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, logits_ptr, best_ptr, mass_ptr, counts_ptr,
    logits_stride, vocab_size, unit,
    TILE: tl.constexpr, TILES: tl.constexpr, COARSE: tl.constexpr, FILTERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the total weight of a tile and, in a row with filters, count its tokens in coarse bins."""
    entry, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + entry).to(tl.int64)
    temperature = tl.load(temperature_ptr + row, mask=row >= 0, other=0.0)
    if temperature > 0.0:
        best, _ = row_best(best_ptr + entry * tiles, TILES, tiles)
        if tl.abs(best) < float("inf"):
            temperature = tl.maximum(temperature, COLDEST)
            best = divided(best, temperature)
            token = tile * TILE + tl.arange(0, TILE)
            log_min_p = tl.load(log_min_p_ptr + row)
            x = scaled_logits(logits_ptr + entry * logits_stride, token, vocab_size, temperature, best, log_min_p)
            limited, filtered = row < 0, row < 0
            if FILTERED:
                filtered = is_filtered(row, top_k_ptr, top_p_ptr, vocab_size)
                limited = ranked_by_weight(row, top_k_ptr, vocab_size) == 0
            if limited:
                if FILTERED:
                    count_tile(x, x, best, unit, False, counts_ptr + entry * COARSE)
            else:
                weight = weights_of(x, best, unit)
                tl.store(mass_ptr + entry * tiles + tile, tl.sum(weight.to(tl.int64)))
                if FILTERED:  # noqa: SIM102  the inner condition is evaluated on the device
                    if filtered:
                        count_tile(x, weight, best, unit, True, counts_ptr + entry * COARSE)


@triton.jit
def _list_kernel(
    row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, logits_ptr, best_ptr, mass_ptr,
    counts_ptr, numbers_ptr, masses_ptr, listed_ptr, ids_ptr, logits_stride, vocab_size, unit,
    TILE: tl.constexpr, TILES: tl.constexpr, COARSE: tl.constexpr, BINS: tl.constexpr, MOST: tl.constexpr,
    PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """List the candidates of a tile, in a row with filters."""
    entry, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + entry).to(tl.int64)
    temperature = tl.load(temperature_ptr + row, mask=row >= 0, other=0.0)
    if temperature > 0.0:
        best, _ = row_best(best_ptr + entry * tiles, TILES, tiles)
        if (tl.abs(best) < float("inf")) & is_filtered(row, top_k_ptr, top_p_ptr, vocab_size):
            temperature = tl.maximum(temperature, COLDEST)
            best = divided(best, temperature)
            token, logits = tile * TILE + tl.arange(0, TILE), logits_ptr + entry * logits_stride
            log_min_p, by_weight = tl.load(log_min_p_ptr + row), ranked_by_weight(row, top_k_ptr, vocab_size)
            fits, lowest = lowest_candidate(
                tl.load(counts_ptr + entry * COARSE + tl.arange(0, COARSE)),
                row_mass(mass_ptr + entry * tiles, TILES, tiles), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row),
                by_weight, best, log_min_p, temperature, unit, MOST,
            )  # fmt: skip
            if fits:
                x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
                list_tile(token, (x >= lowest) & (token < vocab_size), listed_ptr + entry, ids_ptr + entry * MOST, MOST)
            else:
                line = entry * BINS
                for start in range(tile * TILE, (tile + 1) * TILE, PART):  # few at a time, to limit registers
                    scaled = scaled_logits(logits, start + tl.arange(0, PART), vocab_size, temperature, best, log_min_p)
                    weight = weights_of(scaled, best, unit)
                    sum_tile(scaled, weight, best, unit, by_weight, numbers_ptr + line, masses_ptr + line)


@triton.jit
def _draw(
    logits_ptr, mass_ptr, tiles, vocab_size, temperature, best, log_min_p, number, unit,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the first token, in the order of ids, at which the cumulative weight exceeds the fraction `number` of the
    total."""
    tile = tl.arange(0, TILES)
    mass = tl.load(mass_ptr + tile, mask=tile < tiles, other=0)
    share = share_of(tl.sum(mass), number)
    skipped = tl.cumsum(mass, 0) <= share
    chosen = tl.minimum(tl.sum(skipped.to(tl.int32)), tiles - 1)
    share -= tl.sum(tl.where(skipped, mass, 0))
    token = chosen * TILE + tl.arange(0, TILE)
    x = scaled_logits(logits_ptr, token, vocab_size, temperature, best, log_min_p)
    place = tl.sum((tl.cumsum(weights_of(x, best, unit).to(tl.int64), 0) <= share).to(tl.int32))
    return tl.minimum(chosen * TILE + place, vocab_size - 1)


@triton.jit
def _choose_kernel(
    row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, stream_ptr, length_ptr, num_prompt_ptr,
    logits_ptr, best_ptr, best_id_ptr, mass_ptr, counts_ptr, numbers_ptr, masses_ptr, listed_ptr, ids_ptr, out_ptr,
    tiles, logits_stride, vocab_size, unit,
    TILE: tl.constexpr, TILES: tl.constexpr, COARSE: tl.constexpr, BINS: tl.constexpr, MOST: tl.constexpr,
    FEW: tl.constexpr, CHUNK: tl.constexpr, FILTERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose the token of one entry: greedy, from all tokens, or among the filtered candidates."""
    entry = tl.program_id(0).to(tl.int64)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + entry).to(tl.int64)
    if row < 0:
        tl.store(out_ptr + entry, 0)
    else:
        temperature = tl.load(temperature_ptr + row)
        best, tile = row_best(best_ptr + entry * tiles, TILES, tiles)
        token_id = tl.load(best_id_ptr + entry * tiles + tile).to(tl.int64)
        if not (tl.abs(best) < float("inf")):
            token_id = tl.where(best == float("-inf"), NOTHING_ALLOWED, NOT_FINITE).to(tl.int64)
        elif temperature > 0.0:
            temperature = tl.maximum(temperature, COLDEST)
            best = divided(best, temperature)
            number = uniform(tl.load(stream_ptr + row), tl.load(length_ptr + entry) - tl.load(num_prompt_ptr + row))
            logits, log_min_p = logits_ptr + entry * logits_stride, tl.load(log_min_p_ptr + row)
            filtered = row < 0
            if FILTERED:
                filtered = is_filtered(row, top_k_ptr, top_p_ptr, vocab_size)
            if filtered:
                if FILTERED:
                    token_id = draw_filtered(
                        logits, vocab_size, temperature, best, log_min_p, unit,
                        row_mass(mass_ptr + entry * tiles, TILES, tiles),
                        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), number,
                        counts_ptr + entry * COARSE, numbers_ptr + entry * BINS, masses_ptr + entry * BINS,
                        listed_ptr + entry, ids_ptr + entry * MOST, MOST, FEW, CHUNK,
                    ).to(tl.int64)  # fmt: skip
            else:
                token_id = _draw(
                    logits, mass_ptr + entry * tiles, tiles, vocab_size, temperature, best, log_min_p, number, unit,
                    TILE, TILES,
                ).to(tl.int64)  # fmt: skip
        tl.store(out_ptr + entry, token_id)


@triton.jit(do_not_specialize=["entries"])
def _append_kernel(
    row_ptr, ids_ptr, tokens_ptr, lengths_ptr, tokens_stride, capacity, entries,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Append one token to each row of a block of entries."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    known = row >= 0
    length = tl.load(lengths_ptr + row, mask=known, other=0)
    token_id = tl.maximum(tl.load(ids_ptr + entry, mask=known, other=0), 0)
    at = tokens_ptr + row * tokens_stride + length
    tl.store(at, token_id.to(tokens_ptr.dtype.element_ty), mask=known & (length < capacity))
    tl.store(lengths_ptr + row, length + 1, mask=known)


def sample(
    logits: Tensor,  # [entries, vocab]: any float dtype; is not changed
    rows: Tensor,  # [entries] int: persistent row of each entry; negative: padding, its id is 0
    lengths: Tensor,  # [entries] int64: number of tokens of each entry's row; a row may occur with several lengths
    parameters: RowParameters,
    num_prompt: Tensor,  # [all rows] int64: length of the prompt
    space: SampleSpace,
    out: Tensor,  # [entries] int64: token ids
    *,
    dependent: bool = False,  # programmatic dependent launch of every kernel
) -> None:
    """Sample a token per entry, as the runtime's sampler does after its other transforms.

    Order: temperature, min_p, top_k, top_p. Ties rank by id, lowest first; greedy takes the lowest id. An entry whose
    highest logit is NaN or infinite gets -1, one with only minus infinity gets -2. If `space` was made without filters,
    top_k and top_p of every row are taken to be off.
    """
    entries, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    check_rows(logits, "logits")
    check(space.best.shape == (entries, tiles), "the sample space was made for another batch or vocabulary")
    check(rows.shape == out.shape == (entries,) and out.dtype == torch.int64, "rows and out hold a number per entry")
    check(lengths.shape == (entries,), "a length per entry")
    if entries == 0:
        return
    filters, place = space.filters, (logits.stride(0), vocab_size)
    memory = (None,) * 5 if filters is None else tuple(filters)
    settings = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.log_min_p)
    unit = units(vocab_size)
    both = {"TILE": TILE, "DEPENDENT": dependent, "num_stages": 1, "launch_pdl": dependent}
    sizes = both | {"TILES": power_of_two(tiles), "COARSE": sampling_filters.COARSE.value}
    lists = {"BINS": sampling_search.BINS.value, "MOST": sampling_filters.MOST_CANDIDATES}
    grid = (entries, tiles)
    _best_kernel[grid](rows, logits, space.best, space.best_id, *place, **both, num_warps=_TILE_WARPS)
    _weigh_kernel[grid](
        rows, *settings, logits, space.best, space.mass, memory[0], *place, unit,
        FILTERED=filters is not None, **sizes, num_warps=_TILE_WARPS,
    )  # fmt: skip
    if filters is not None:
        _list_kernel[grid](
            rows, *settings, logits, space.best, space.mass, *memory, *place, unit,
            PART=min(TILE, _PART), **sizes, **lists, num_warps=_TILE_WARPS,
        )  # fmt: skip
    _choose_kernel[(entries,)](
        rows, *parameters, lengths, num_prompt, logits, space.best, space.best_id, space.mass,
        *memory, out, tiles, *place, unit, FEW=sampling_filters.FEW_CANDIDATES, CHUNK=_CHUNK,
        FILTERED=filters is not None, **sizes, **lists,
        num_warps=_ROW_WARPS if filters is None else _SEARCH_WARPS,
    )  # fmt: skip


def append_tokens(rows: Tensor, token_ids: Tensor, history: RowTokens, *, dependent: bool = False) -> None:
    """Append an id to each of `rows` [entries] (all distinct; negative: padding). Negative ids, which mark failures,
    are stored as 0.

    A full row keeps its tokens and only counts its length up; the host ends it.
    """
    entries, capacity = len(rows), history.tokens.shape[1]
    if entries == 0:
        return
    check(token_ids.shape == rows.shape, "a token id per row")
    block = 256  # fixed, so that one kernel serves every number of entries
    _append_kernel[(triton.cdiv(entries, block),)](
        rows, token_ids, history.tokens, history.lengths, history.tokens.stride(0), capacity, entries,
        BLOCK=block, DEPENDENT=dependent, num_warps=1, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
