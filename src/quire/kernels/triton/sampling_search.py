"""The search behind top_k and top_p: one program finds a row's token by thresholds over integer keys.

Tokens of equal key have equal weight. So each question (which token is the k-th, where does the nucleus end, where does
the random share fall) is to find the highest key such that the number or weight of tokens at or above it exceeds a
bound; the rest is a division. Several thresholds are tried at once, so ten iterations resolve 32 bits.

The tokens searched are a short list of candidates, held in registers. A row with too many of them is searched by bins:
the sums of the bins tell which one contains the answer, and that bin's tokens become the candidates. Tokens of zero
weight are never drawn and never counted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.sampling_weights import scaled_logits, share_of, weights_of

BINS = tl.constexpr(2048)
BINS_PER_UNIT = tl.constexpr(64.0)  # per unit of logit below the best; a power of two, so that bin borders are exact
WEIGHT_SHIFT = tl.constexpr(17)  # shift of a weight's float bits: 64 bins per factor of two
_HIDDEN = tl.constexpr(-(2**31))  # key of tokens that are masked out: below every threshold
_LOWEST_KEY = tl.constexpr(-(2**31) + 1)
_ROW_WIDTH = tl.constexpr(8)  # thresholds tried at once over a whole row
_ROW_CHUNK = tl.constexpr(1024)  # tokens of a whole row processed at a time


@triton.jit
def keys_of(x, weight, by_weight):
    """Return int32 keys that order tokens as their scaled logits do, or as their weights."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(by_weight, weight.to(tl.int32, bitcast=True), bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def highest_bin(unit):
    """Return the leading bits of the best token's weight, from which bins of weights count down."""
    return tl.full((), unit, tl.float32).to(tl.int32, bitcast=True) >> WEIGHT_SHIFT


@triton.jit
def bins_of(x, weight, best, unit, by_weight):
    """Return the distance of tokens from the best one, in bins; the last bin holds everything farther. Equal keys share
    a bin."""
    by_logit = tl.minimum((best - x) * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)
    farther = tl.minimum(highest_bin(unit) - (weight.to(tl.int32, bitcast=True) >> WEIGHT_SHIFT), BINS - 1)
    return tl.where(by_weight, farther, by_logit)


@triton.jit
def _row_tokens(row, token):
    """Return keys (_HIDDEN past the end and for zero weight), weights and bins of some tokens of a row."""
    logits, vocab_size, temperature, best, log_min_p, unit, by_weight = row
    x = scaled_logits(logits, token, vocab_size, temperature, best, log_min_p)
    weight = weights_of(x, best, unit)
    key = tl.where(weight > 0.0, keys_of(x, weight, by_weight), _HIDDEN)
    return key, weight.to(tl.int64), bins_of(x, weight, best, unit, by_weight)


@triton.jit
def _tally_row(row, thresholds, by_number, within):
    """Return the number or weight of a row's tokens at or above each threshold [WIDTH].

    With `within`, only the tokens of that key are counted, and the negative of their id is compared.
    """
    total = tl.zeros((_ROW_CHUNK, _ROW_WIDTH), tl.int64)
    for start in range(0, row[1], _ROW_CHUNK):
        token = start + tl.arange(0, _ROW_CHUNK)
        key, weight, _ = _row_tokens(row, token)
        rank = tl.where(within == _HIDDEN, key, tl.where(key == within, -token, _HIDDEN))
        amount = tl.where(by_number, 1, weight)
        total += tl.where(rank[:, None] >= thresholds[None, :], amount[:, None], 0)
    return tl.sum(total, 0)


@triton.jit
def _narrowed(lowest, highest, thresholds, step, enough):
    """Return the range that contains the answer after some thresholds were tried: thresholds that are `enough` come
    first."""
    passed = tl.sum(enough.to(tl.int64))
    width: tl.constexpr = thresholds.shape[0]
    below = tl.minimum(lowest + (passed + 1) * step, highest) - 1
    return tl.minimum(lowest + passed * step, highest), tl.where(passed < width, below, highest)


@triton.jit
def _thresholds(lowest, highest, WIDTH: tl.constexpr):
    step = tl.cdiv(highest - lowest, WIDTH)
    return tl.minimum(lowest + (tl.arange(0, WIDTH) + 1) * step, highest), step


@triton.jit
def _search_list(key, amount, lowest, highest, bound, WIDTH: tl.constexpr):
    """Return the highest threshold in lowest .. highest such that the amounts [N, 1] at or above it sum to more than
    the bound."""
    while lowest < highest:
        thresholds, step = _thresholds(lowest, highest, WIDTH)
        sums = tl.sum(tl.where(key >= thresholds.to(tl.int32)[None, :], amount, 0), 0)
        lowest, highest = _narrowed(lowest, highest, thresholds, step, sums > bound)
    return lowest


@triton.jit
def _search_row(row, lowest, highest, bound, by_number, within):
    """Like `_search_list`, over all tokens of a row."""
    while lowest < highest:
        thresholds, step = _thresholds(lowest, highest, _ROW_WIDTH)
        sums = _tally_row(row, thresholds.to(tl.int32), by_number, within)
        lowest, highest = _narrowed(lowest, highest, thresholds, step, sums > bound)
    return lowest


@triton.jit
def _highest_of_list(key, weight, highest, bound, by_number, WIDTH: tl.constexpr):
    """Return the highest key such that the number (or weight) of tokens at or above it exceeds the bound.

    Also returns the number and weight of the tokens above it, and the weight of each token with that key.
    """
    lowest = tl.min(tl.where(key == _HIDDEN, 0x7FFFFFFF, key)).to(tl.int64) - 1  # the result if no key is enough
    found = _search_list(key, tl.where(by_number, (key != _HIDDEN).to(tl.int64), weight), lowest, highest, bound, WIDTH)
    above = key > found
    number, mass = tl.sum(above.to(tl.int64)), tl.sum(tl.where(above, weight, 0))
    return found, number, mass, tl.max(tl.where(key == found, weight, 0))


@triton.jit
def _nth_of_list(key, ids, wanted, index, vocab_size, WIDTH: tl.constexpr):
    """Return the id of the token at position `index`, in the order of ids, among the tokens with the wanted key."""
    same = key == wanted
    lowest, highest = tl.full((), 1, tl.int64) - vocab_size, tl.zeros((), tl.int64)
    return -_search_list(tl.where(same, -ids, _HIDDEN), same.to(tl.int64), lowest, highest, index, WIDTH)


@triton.jit
def _load_list(row, ids_ptr, count, SIZE: tl.constexpr):
    """Load keys, weights and ids [SIZE, 1] of listed tokens; _HIDDEN past the end of the list."""
    place = tl.arange(0, SIZE)[:, None]
    ids = tl.load(ids_ptr + place, mask=place < count, other=0x7FFFFFFF, cache_modifier=".cg")
    key, weight, _ = _row_tokens(row, ids)
    return key, weight, ids


@triton.jit
def _list_bin(row, wanted, ids_ptr, CHUNK: tl.constexpr):
    """Make the tokens of one bin of a row the candidates."""
    passed = tl.zeros((), tl.int32)
    tl.debug_barrier()
    for start in range(0, row[1], CHUNK):
        token = start + tl.arange(0, CHUNK)
        key, _, bins = _row_tokens(row, token)
        inside = (key != _HIDDEN) & (bins == wanted)
        tl.store(ids_ptr + passed + tl.cumsum(inside.to(tl.int32), 0) - 1, token, mask=inside)
        passed += tl.sum(inside.to(tl.int32))
    tl.debug_barrier()


@triton.jit
def _highest_of_row(
    row, ids_ptr, numbers, masses, highest, bound, by_number, binned, MOST: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Like `_highest_of_list`, over a row whose bins hold `numbers` and `masses`. Also returns the number of candidates
    it listed.

    That is -1 if the bin has more than MOST tokens, or the row is not binned: then the row was searched token by token.
    """
    passed = tl.cumsum(tl.where(by_number, numbers.to(tl.int64), masses), 0) <= bound
    wanted = tl.minimum(tl.sum(passed.to(tl.int32)), BINS - 1)
    number, mass = tl.sum(tl.where(passed, numbers, 0)).to(tl.int64), tl.sum(tl.where(passed, masses, 0))
    count = tl.sum(tl.where(tl.arange(0, BINS) == wanted, numbers, 0))
    if binned & (count <= MOST):
        _list_bin(row, wanted, ids_ptr, CHUNK)
        keys, weights, _ = _load_list(row, ids_ptr, count, MOST)
        left = bound - tl.where(by_number, number, mass)
        key, ahead, ahead_mass, each = _highest_of_list(keys, weights, highest, left, by_number, 4)
        number, mass = number + ahead, mass + ahead_mass
    else:
        none = tl.full((), _HIDDEN, tl.int32)
        lowest = tl.full((), _LOWEST_KEY, tl.int64)
        key = _search_row(row, lowest, highest, bound, by_number, none)
        just_above = tl.minimum(key + tl.arange(0, _ROW_WIDTH), 0x7FFFFFFF).to(tl.int32)  # only the first two are used
        first = tl.arange(0, _ROW_WIDTH)
        counts, sums = _tally_row(row, just_above, True, none), _tally_row(row, just_above, False, none)
        number, mass = tl.sum(tl.where(first == 1, counts, 0)), tl.sum(tl.where(first == 1, sums, 0))
        equals = tl.sum(tl.where(first == 0, counts, 0)) - number
        each = (tl.sum(tl.where(first == 0, sums, 0)) - mass) // tl.maximum(equals, 1)
        count = tl.full((), -1, tl.int32)
    return key, number, mass, each, count


@triton.jit
def _needed(kept, top_p):
    """Return the least integer weight that is at least the share top_p of the kept weight."""
    return tl.ceil(kept.to(tl.float64) * top_p).to(tl.int64)


@triton.jit
def _bound(stage, kept, top_k, top_p, number):
    """Return the bound that a stage must exceed: the number of tokens before the k-th, the weight before the nucleus
    ends, or the random share."""
    bound = tl.where(stage == 1, _needed(kept, top_p) - 1, share_of(kept, number))
    return tl.where(stage == 0, top_k - 1, bound)


@triton.jit
def _kept(stage, kept, top_k, top_p, ahead, mass, each):
    """Return the weight of the tokens that are kept after a stage."""
    needed = _needed(kept, top_p)
    after_top_p = mass + tl.cdiv(needed - mass, tl.maximum(each, 1)) * each
    return tl.where(stage == 0, mass + (top_k - ahead) * each, tl.where(stage == 1, after_top_p, kept))


@triton.jit
def select_from_list(
    row, ids_ptr, count, total, top_k, top_p, limited, number, highest, SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the token that the random `number` draws from the kept ones of a list of at most SIZE candidates.

    `total` is the weight of the whole row, unused if top_k is on (`limited`); `highest` is the best key.
    """
    key, weight, ids = _load_list(row, ids_ptr, count, SIZE)
    kept = total
    wanted, mass, each = highest, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for stage in range(3):  # top_k, top_p, the draw
        if (stage == 2) | ((stage == 0) & limited) | ((stage == 1) & (top_p < 1.0)):
            bound = _bound(stage, kept, top_k, top_p, number)
            wanted, ahead, mass, each = _highest_of_list(key, weight, highest, bound, stage == 0, WIDTH)
            kept = _kept(stage, kept, top_k, top_p, ahead, mass, each)
    index = (share_of(kept, number) - mass) // tl.maximum(each, 1)
    return _nth_of_list(key, ids, wanted, index, row[1], WIDTH)


@triton.jit
def select_from_row(
    row, ids_ptr, numbers, masses, total, top_k, top_p, limited, number, highest, binned,
    MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Like `select_from_list`, from a whole row by its bins; overwrites the list of candidates."""
    kept = tl.where(limited & binned, tl.sum(masses), total)
    wanted, mass, each = highest, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    count = tl.full((), -1, tl.int32)
    enough = (tl.sum(numbers) >= top_k) | (binned == 0)
    for stage in range(3):
        if (stage == 2) | ((stage == 0) & limited & enough) | ((stage == 1) & (top_p < 1.0)):
            bound = _bound(stage, kept, top_k, top_p, number)
            wanted, ahead, mass, each, count = _highest_of_row(
                row, ids_ptr, numbers, masses, highest, bound, stage == 0, binned, MOST, CHUNK
            )
            kept = _kept(stage, kept, top_k, top_p, ahead, mass, each)
    index = (share_of(kept, number) - mass) // tl.maximum(each, 1)
    if count >= 0:
        key, _, ids = _load_list(row, ids_ptr, count, MOST)
        token = _nth_of_list(key, ids, wanted, index, row[1], 4)
    else:
        lowest, top = tl.full((), 1, tl.int64) - row[1], tl.zeros((), tl.int64)
        token = -_search_row(row, lowest, top, index, True, wanted.to(tl.int32))
    return token
