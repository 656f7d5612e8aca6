"""Log-probabilities of raw logits: of the chosen tokens with their ranks, and of the most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows, power_of_two
from quire.kernels.triton.sampling_weights import TILE, row_best

MOST_LISTED = 32
_LOWEST = tl.constexpr(-(2**63))
_LOW_WORD = tl.constexpr(0xFFFFFFFF)


class LogprobSpace(NamedTuple):
    """Scratch memory for a batch of a fixed size."""

    best: Tensor  # [entries, tiles] float32: highest logit of each tile
    total: Tensor  # [entries, tiles] float32: sum of exp(logit - best) of each tile
    higher: Tensor  # [entries, tiles] int32: logits above the chosen token's
    listed: Tensor  # [entries, tiles, MOST_LISTED] int64: the tile's most likely tokens, packed

    @classmethod
    def make(cls, entries: int, vocab_size: int, device: torch.device) -> LogprobSpace:
        shape = (entries, triton.cdiv(vocab_size, TILE))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(*shape, MOST_LISTED, dtype=torch.int64, device=device),
        )


@triton.jit
def _packed(x, token):
    """Pack logit and token into an int64 that sorts by logit, ties by lowest id."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (_LOW_WORD - token.to(tl.int64))


@triton.jit
def _tile_kernel(
    logits_ptr, ids_ptr, best_ptr, total_ptr, higher_ptr, listed_ptr, logits_stride, listed_stride, vocab_size, listed,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program per (entry, tile of the vocabulary): maximum, sum of exponentials, rank count and top tokens of the
    tile."""
    entry, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    logits = logits_ptr + entry * logits_stride
    x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.maximum(tl.load(ids_ptr + entry), 0)
    own = tl.load(logits + chosen).to(tl.float32)
    best = tl.max(x)
    at = entry * tiles + tile
    tl.store(best_ptr + at, best)
    tl.store(total_ptr + at, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - best))))
    tl.store(higher_ptr + at, tl.sum((x > own).to(tl.int32)))
    packed = tl.where(inside, _packed(x, token), _LOWEST)
    for rank in range(listed):
        top = tl.max(packed)
        tl.store(listed_ptr + at * listed_stride + rank, top)
        packed = tl.where(packed == top, _LOWEST, packed)


@triton.jit
def _row_kernel(
    logits_ptr, ids_ptr, best_ptr, total_ptr, higher_ptr, listed_ptr, logprob_ptr, rank_ptr, top_ids_ptr,
    top_logprobs_ptr, tiles, logits_stride, listed_stride, listed, TILES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One program per entry: combine its tiles to logprobs, rank and top tokens."""
    entry, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    logits, at = logits_ptr + entry * logits_stride, entry * tiles + tile
    best, _ = row_best(best_ptr + entry * tiles, TILES, tiles)
    tops = tl.load(best_ptr + at, mask=tile < tiles, other=float("-inf"))
    totals = tl.load(total_ptr + at, mask=tile < tiles, other=0.0)
    shift = best + tl.log(tl.sum(tl.where(tops == float("-inf"), 0.0, totals * tl.exp(tops - best))))
    chosen = tl.maximum(tl.load(ids_ptr + entry), 0)
    tl.store(logprob_ptr + entry, tl.load(logits + chosen).to(tl.float32) - shift)
    tl.store(rank_ptr + entry, tl.sum(tl.load(higher_ptr + at, mask=tile < tiles, other=0)) + 1)
    place = tl.arange(0, TILES * LISTED)
    inside = (place // LISTED < tiles) & (place % LISTED < listed)
    from_tile = (entry * tiles + place // LISTED) * listed_stride + place % LISTED
    packed = tl.load(listed_ptr + from_tile, mask=inside, other=_LOWEST)
    for rank in range(listed):
        top = tl.max(packed)
        token = _LOW_WORD - (top & _LOW_WORD)
        tl.store(top_ids_ptr + entry * listed + rank, token.to(tl.int32))
        tl.store(top_logprobs_ptr + entry * listed + rank, tl.load(logits + token).to(tl.float32) - shift)
        packed = tl.where(packed == top, _LOWEST, packed)


class Logprobs(NamedTuple):
    """The results of `logprobs`."""

    chosen: Tensor  # [entries] float32
    rank: Tensor  # [entries] int32: 1 + number of tokens with a higher logit
    top_ids: Tensor  # [entries, listed] int32: descending by logit, ties by lowest id
    top_logprobs: Tensor  # [entries, listed] float32

    @classmethod
    def make(cls, entries: int, listed: int, device: torch.device) -> Logprobs:
        return cls(
            torch.empty(entries, dtype=torch.float32, device=device),
            torch.empty(entries, dtype=torch.int32, device=device),
            torch.empty(entries, listed, dtype=torch.int32, device=device),
            torch.empty(entries, listed, dtype=torch.float32, device=device),
        )


def logprobs(logits: Tensor, token_ids: Tensor, space: LogprobSpace, out: Logprobs) -> None:
    """Compute log-softmax of logits [entries, vocab] at `token_ids` [entries] and at the `listed` most likely tokens (0
    .. MOST_LISTED).

    Logits are raw: before penalties and temperature. A negative id, which marks a failed row, counts as 0. The results
    of a row with non-finite logits are undefined.
    """
    entries, vocab_size = logits.shape
    tiles, listed = triton.cdiv(vocab_size, TILE), out.top_ids.shape[1]
    check_rows(logits, "logits")
    check(space.best.shape == (entries, tiles), "the space was made for another batch or vocabulary")
    check(token_ids.shape == (entries,) == out.chosen.shape, "a token id and a result per entry")
    check(listed <= min(MOST_LISTED, vocab_size), f"at most {MOST_LISTED} tokens, and no more than there are")
    if entries == 0:
        return
    _tile_kernel[(entries, tiles)](
        logits, token_ids, space.best, space.total, space.higher, space.listed, logits.stride(0), MOST_LISTED,
        vocab_size, listed, TILE=TILE, num_warps=8, num_stages=1,
    )  # fmt: skip
    _row_kernel[(entries,)](
        logits, token_ids, space.best, space.total, space.higher, space.listed, *out, tiles, logits.stride(0),
        MOST_LISTED, listed, TILES=power_of_two(tiles), LISTED=power_of_two(max(1, listed)), num_warps=8, num_stages=1,
    )  # fmt: skip
