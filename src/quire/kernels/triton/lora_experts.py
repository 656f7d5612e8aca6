"""LoRA for routed experts: low-rank updates of (token, expert) pairs, in two launches.

Pairs are in tiles of one expert each, as `grouped.route` placed them; the tokens of a tile may have different adapters.
A program loops over the distinct slots of its tile's tokens, lowest first, and multiplies the rows of each slot by that
slot's A or B for the expert. All of this is determined on the device, so a step can be captured. With few pairs, K is
split over programs; the expand kernel adds the partial sums in the order of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.grouped import Routing
from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two

RANK_STEP = 16  # ranks are multiples of this
MOST_PLACES = 8_192  # of partial sums, unless there are more pairs
_MOST_SPLITS = 8
_BLOCK_K, _BLOCK_N = 64, 128
_NO_SLOT = tl.constexpr(1 << 30)  # larger than all slots


@triton.jit
def _next_slot(slots, last):
    """Return the lowest of `slots` above `last`, or _NO_SLOT if there is none."""
    return tl.min(tl.where(slots > last, slots, _NO_SLOT), 0)


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, low_ptr, ranks_ptr, slots_ptr, places_ptr, tile_experts_ptr, K, x_stride, slot_stride, expert_stride,
    ranks_stride, low_stride, split_stride, steps,
    USED: tl.constexpr, PAIRS_OF_ROW: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Shrink: low [splits, pairs, parts * MAX_RANK] = x A^T over the inputs of a split."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    k = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    mine = tl.minimum(steps, tl.cdiv(K, BLOCK_K) - split * steps)
    await_inputs(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places_ptr + tile * BLOCK_M + m)
        slots = tl.load(slots_ptr + pair // USED, mask=pair >= 0, other=-1)
        row = tl.where(pair >= 0, pair // PAIRS_OF_ROW, 0).to(tl.int64)
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        a_at = a_ptr + expert * expert_stride + (part * MAX_RANK + r)[None, :].to(tl.int64) * K + k[:, None]
        low_at = low_ptr + split * split_stride + pair[:, None].to(tl.int64) * low_stride + part * MAX_RANK
        slot = _next_slot(slots, -1)
        while slot < _NO_SLOT:
            is_mine, at = (slots == slot)[:, None], a_at + slot.to(tl.int64) * slot_stride
            rank = tl.load(ranks_ptr + slot.to(tl.int64) * ranks_stride + part)
            for begin in range(0, rank, BLOCK_R):
                acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                is_rank = (begin + r < rank)[None, :]
                for step in range(mine):
                    shift = step * BLOCK_K
                    if EVEN_K:
                        x = tl.load(x_at + shift, mask=is_mine, other=0.0)
                        a = tl.load(at + begin * K + shift, mask=is_rank, other=0.0)
                    else:
                        inside = k + shift < K
                        x = tl.load(x_at + shift, mask=is_mine & inside[None, :], other=0.0)
                        a = tl.load(at + begin * K + shift, mask=is_rank & inside[:, None], other=0.0)
                    acc = tl.dot(x, a, acc, input_precision=PRECISION)
                tl.store(low_at + (begin + r)[None, :], acc, mask=is_mine & is_rank)
            slot = _next_slot(slots, slot)


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, out_ptr, ranks_ptr, slots_ptr, places_ptr, tile_experts_ptr, outputs, slot_stride, expert_stride,
    ranks_stride, low_stride, split_stride, out_stride,
    USED: tl.constexpr, MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Expand: out += low B^T for a block of the outputs of a part."""
    tile, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, r, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R), block * BLOCK_N + tl.arange(0, BLOCK_N)
    await_inputs(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places_ptr + tile * BLOCK_M + m)
        slots = tl.load(slots_ptr + pair // USED, mask=pair >= 0, other=-1)
        is_output = (n < outputs)[None, :]
        output = (part * outputs + n).to(tl.int64)
        b_at = b_ptr + expert * expert_stride + output[None, :] * MAX_RANK + r[:, None]
        low_at = low_ptr + pair[:, None].to(tl.int64) * low_stride + (part * MAX_RANK + r)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        slot = _next_slot(slots, -1)
        while slot < _NO_SLOT:
            at = b_at + slot.to(tl.int64) * slot_stride
            rank = tl.load(ranks_ptr + slot.to(tl.int64) * ranks_stride + part)
            for begin in range(0, rank, BLOCK_R):
                is_rank = begin + r < rank
                is_used = (slots == slot)[:, None] & is_rank[None, :]
                low = tl.load(low_at + begin, mask=is_used, other=0.0)
                for split in tl.static_range(1, SPLITS):
                    low += tl.load(low_at + begin + split * split_stride, mask=is_used, other=0.0)
                b = tl.load(at + begin, mask=is_rank[:, None] & is_output, other=0.0)
                acc = tl.dot(low.to(b.dtype), b, acc, input_precision=PRECISION)
            slot = _next_slot(slots, slot)
        at = out_ptr + pair[:, None].to(tl.int64) * out_stride + output[None, :]
        inside = (slots >= 0)[:, None] & is_output
        product = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (product + acc).to(out_ptr.dtype.element_ty), mask=inside)


def add_to_pairs(
    out: Tensor,  # [pairs, outputs], updated in place
    x: Tensor,  # [tokens, inputs], or [pairs, inputs]
    a: Tensor,  # [slots, experts, parts * max rank, inputs], for the routing's own experts
    b: Tensor,  # [slots, experts, outputs, max rank]: the parts have equal numbers of outputs
    ranks: Tensor,  # [slots, parts] int32, multiples of RANK_STEP; 0: the adapter does not change the part
    slots: Tensor,  # [tokens] int32: slot of each token's adapter; negative: none
    routing: Routing,
    *,
    dependent: bool = False,
) -> None:
    """Add (x A^T) B^T to `out`, with the A and B that the slot of a pair's token has for its expert. Pairs of tokens
    without an adapter, and of experts outside the routing's own, are unchanged."""
    (num_slots, experts, outputs, max_rank), inputs = b.shape, x.shape[1]
    parts, (tokens, used), tiles = a.shape[2] // max_rank, routing.chosen.shape, len(routing.tile_experts)
    pairs = tokens * used
    check_rows(out, "out")
    check_rows(x, "x")
    check(out.shape == (pairs, outputs) and len(x) in (tokens, pairs), "out is [pairs, outputs]")
    check(a.shape == (num_slots, experts, parts * max_rank, inputs), "sizes of a, b, x and out")
    check(experts == len(routing.own) and outputs % parts == 0, "matrices of the routing's own experts")
    check(a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype == x.dtype, "a, b and x have one dtype")
    check(ranks.shape == (num_slots, parts) and max_rank % RANK_STEP == 0, "ranks")
    check(slots.shape == (tokens,) and slots.is_contiguous(), "slots: a number per token")
    if pairs == 0:
        return
    block_m, block_r = len(routing.places) // tiles, min(power_of_two(max_rank), 64)
    block_k = min(max(16, power_of_two(inputs)), _BLOCK_K)
    steps = triton.cdiv(inputs, block_k)
    steps = triton.cdiv(steps, max(1, min(_MOST_SPLITS, MOST_PLACES // pairs, steps)))
    splits = triton.cdiv(inputs, block_k * steps)  # no program without inputs
    low = torch.empty(splits, pairs, parts * max_rank, dtype=torch.float32, device=x.device)
    precision, warps = "ieee" if x.dtype == torch.float32 else "tf32", 4 if block_m < 128 else 8
    where = (ranks, slots, routing.places, routing.tile_experts)
    _shrink_kernel[(tiles, parts, splits)](
        x, a, low, *where, inputs, x.stride(0), a.stride(0), a.stride(1), ranks.stride(0), low.stride(1),
        low.stride(0), steps, USED=used, PAIRS_OF_ROW=pairs // len(x), MAX_RANK=max_rank, BLOCK_M=block_m,
        BLOCK_R=block_r, BLOCK_K=block_k, EVEN_K=inputs % block_k == 0, PRECISION=precision, DEPENDENT=dependent,
        num_warps=warps, num_stages=3, launch_pdl=dependent,
    )  # fmt: skip
    each = outputs // parts
    _expand_kernel[(tiles, parts, triton.cdiv(each, _BLOCK_N))](
        low, b, out, *where, each, b.stride(0), b.stride(1), ranks.stride(0), low.stride(1), low.stride(0),
        out.stride(0), USED=used, MAX_RANK=max_rank, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_R=block_r,
        PRECISION=precision, DEPENDENT=dependent, num_warps=warps, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
