"""top_k and top_p: draw a token in ranked order without sorting.

The rule is that of the runtime's sampler. With top_k, tokens are ranked by logit, ties by id, and exactly k are kept;
top_p alone ranks by weight, ties by id. top_p then keeps the fewest of them that sum to at least its share of their
weight, and the random number selects from the cumulative weights in that order.

While tokens are weighed, they are counted in coarse bins by distance from the best one. The counts bound which tokens
can matter; these are listed as candidates, by their raw logits, and one program per row searches them. For a row with
too many candidates, the number and weight of its tokens are summed in fine bins instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sampling_search import (
    BINS,
    BINS_PER_UNIT,
    WEIGHT_SHIFT,
    bins_of,
    highest_bin,
    keys_of,
    select_from_list,
    select_from_row,
)
from quire.kernels.triton.sampling_weights import weights_of

MOST_CANDIDATES = 4096
FEW_CANDIDATES = 1024  # a list this short is searched in fewer iterations
COARSE = tl.constexpr(128)  # bins that tokens are counted in
_FINE_PER_COARSE = tl.constexpr(16)


class FilterSpace(NamedTuple):
    """Scratch memory of rows with filters. All but `ids` are zero between batches."""

    counts: Tensor  # [entries, COARSE] int32: tokens by distance from the row's best
    numbers: Tensor  # [entries, BINS] int32: the same in fine bins, for rows with too many candidates
    masses: Tensor  # [entries, BINS] int64: the weight of those tokens
    listed: Tensor  # [entries] int32: number of candidates
    ids: Tensor  # [entries, MOST_CANDIDATES] int32, in any order

    @classmethod
    def make(cls, entries: int, device: torch.device) -> FilterSpace:
        return cls(
            torch.zeros(entries, COARSE.value, dtype=torch.int32, device=device),
            torch.zeros(entries, BINS.value, dtype=torch.int32, device=device),
            torch.zeros(entries, BINS.value, dtype=torch.int64, device=device),
            torch.zeros(entries, dtype=torch.int32, device=device),
            torch.empty(entries, MOST_CANDIDATES, dtype=torch.int32, device=device),
        )


@triton.jit
def is_filtered(row, top_k_ptr, top_p_ptr, vocab_size):
    """Whether a row (not padding) has top_k or top_p."""
    top_k = tl.load(top_k_ptr + row)
    return ((top_k > 0) & (top_k < vocab_size)) | (tl.load(top_p_ptr + row) < 1.0)


@triton.jit
def ranked_by_weight(row, top_k_ptr, vocab_size):
    """Whether tokens of the row rank by weight: top_k is off."""
    top_k = tl.load(top_k_ptr + row)
    return (top_k <= 0) | (top_k >= vocab_size)


@triton.jit
def _farthest(unit):
    """Return the distance below the best logit beyond which no token has any weight."""
    return tl.log(tl.full((), unit, tl.float32)) + 0.01


@triton.jit
def count_tile(x, weight, best, unit, by_weight: tl.constexpr, counts_ptr):
    """Add a tile's tokens to the coarse counts of their row. Tokens ranked by logit are counted without their
    weight."""
    bins = bins_of(x, weight, best, unit, by_weight) // _FINE_PER_COARSE
    real = weight > 0.0 if by_weight else best - x <= _farthest(unit)
    counts = tl.histogram(bins, COARSE, mask=real)
    tl.atomic_add(counts_ptr + tl.arange(0, COARSE), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _level(counts, total, top_k, top_p, by_weight, unit):
    """Return the last coarse bin whose tokens are candidates."""
    bin_id = tl.arange(0, COARSE)
    by_number = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32))
    total = total.to(tl.float64)
    slack = total - tl.ceil(total * top_p)
    ceiling = (highest_bin(unit) - bin_id * _FINE_PER_COARSE + 1) << WEIGHT_SHIFT
    most = ceiling.to(tl.float32, bitcast=True)  # upper bound of the weights in each bin
    beyond = tl.cumsum(counts.to(tl.float64) * most.to(tl.float64), 0, reverse=True)
    return tl.where(by_weight, tl.sum(((beyond > slack) & (bin_id > 0)).to(tl.int32)), by_number)


@triton.jit
def lowest_candidate(counts, total, top_k, top_p, by_weight, best, log_min_p, temperature, unit, MOST: tl.constexpr):
    """Return whether there are few enough candidates, by the counts, and the logit from which on all tokens are
    candidates: the middle of the bin after the last one that holds candidates.

    `best` is divided by the temperature, the returned logit is not.
    """
    bin_id = tl.arange(0, COARSE)
    after = _level(counts, total, top_k, top_p, by_weight, unit) + 1
    fits = tl.sum(tl.where(bin_id <= after, counts, 0)) <= MOST
    middle = after * _FINE_PER_COARSE + _FINE_PER_COARSE // 2
    weight = ((highest_bin(unit) - middle) << WEIGHT_SHIFT).to(tl.float32, bitcast=True)
    distance = tl.where(by_weight, tl.log(unit / weight), middle.to(tl.float32) / BINS_PER_UNIT)
    distance = tl.where(after >= COARSE, _farthest(unit), distance)
    distance = tl.minimum(distance, -log_min_p)
    return fits, temperature * (best - distance - (tl.abs(best) + distance) * 1e-6)


@triton.jit
def list_tile(token, is_candidate, listed_ptr, ids_ptr, MOST: tl.constexpr):
    """Append candidates to the list in any order; those beyond MOST are only counted."""
    place = tl.atomic_add(listed_ptr + tl.zeros_like(token), 1, mask=is_candidate, sem="relaxed")
    tl.store(ids_ptr + place, token, mask=is_candidate & (place < MOST))


@triton.jit
def sum_tile(x, weight, best, unit, by_weight, numbers_ptr, masses_ptr):
    """Add a tile's tokens to the fine bins of a row with too many candidates."""
    bins, real = bins_of(x, weight, best, unit, by_weight), weight > 0.0
    tl.atomic_add(numbers_ptr + bins, 1, mask=real, sem="relaxed")
    tl.atomic_add(masses_ptr + bins, weight.to(tl.int64), mask=real, sem="relaxed")


@triton.jit
def draw_filtered(
    logits_ptr, vocab_size, temperature, best, log_min_p, unit, total, top_k, top_p, number,
    counts_ptr, numbers_ptr, masses_ptr, listed_ptr, ids_ptr,
    MOST: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the token of a row with filters, drawn with the random `number`; clears the row's scratch memory."""
    by_weight = (top_k <= 0) | (top_k >= vocab_size)
    row = (logits_ptr, vocab_size, temperature, best, log_min_p, unit, by_weight)
    highest = keys_of(best, weights_of(best, best, unit), by_weight).to(tl.int64)
    count = tl.load(listed_ptr)
    top_k = top_k.to(tl.int64)
    limited = by_weight == 0
    if (count == 0) | (count > MOST):
        bin_id = tl.arange(0, BINS)
        numbers, masses = tl.load(numbers_ptr + bin_id), tl.load(masses_ptr + bin_id)
        token_id = select_from_row(
            row, ids_ptr, numbers, masses, total, top_k, top_p, limited, number, highest, count == 0, MOST, CHUNK
        )
        tl.store(numbers_ptr + bin_id, tl.zeros_like(numbers))
        tl.store(masses_ptr + bin_id, tl.zeros_like(masses))
    elif count <= FEW:
        token_id = select_from_list(row, ids_ptr, count, total, top_k, top_p, limited, number, highest, FEW, 8)
    else:
        token_id = select_from_list(row, ids_ptr, count, total, top_k, top_p, limited, number, highest, MOST, 4)
    tl.debug_barrier()
    tl.store(listed_ptr, 0)
    tl.store(counts_ptr + tl.arange(0, COARSE), tl.zeros((COARSE,), tl.int32))
    return token_id
