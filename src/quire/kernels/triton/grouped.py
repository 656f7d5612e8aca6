"""Mixture of experts (MoE): grouped gemm of every token's rows with the weights of its own experts, in one launch.

A token and one of its experts form a pair, numbered token * used + rank. The device sorts pairs by expert and starts
each expert at a new tile. Shapes are those of the worst case, so that a step can be captured; unused tiles exit early.
Only the weights of chosen experts are read; pairs of experts that this rank does not hold count as zeros. Each pair
has its own row of results, and a token's pairs are summed in the order of rank: the result never depends on timing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.triton.activation import ACTIVATIONS, activate, clamped
from quire.kernels.triton.gemm_skinny import sum_tiles
from quire.kernels.triton.launch import (
    FLOAT8,
    await_inputs,
    check,
    check_rows,
    power_of_two,
    shared_memory,
    warps_for,
)

_FEWEST_AT_ONCE, _MOST_AT_ONCE = 128, 4096  # pairs that a program handles at a time: at least one per thread
_FEWEST_BINS = 32
_TILES_AT_ONCE = 128
_COLUMNS = 1024
SMALLEST_SUM = tl.constexpr(1e-20)  # added to the sum of the weights, since the sum of sigmoids may be 0


class GroupedTiling(NamedTuple):
    """Tile sizes of a grouped gemm. block_m is a power of two from 16 on."""

    block_m: int  # pairs
    block_n: int  # outputs
    block_k: int
    warps: int
    stages: int
    together: int = 8  # tiles grouped for L2 reuse: their programs run side by side


class Stack(NamedTuple):
    """One weight matrix per expert."""

    numbers: Tensor  # [experts, outputs, inputs]: of the activations' dtype, or float8
    scale: Tensor | None  # [experts, outputs] float32, for float8
    bias: Tensor | None = None  # [experts, outputs]


class Routing(NamedTuple):
    """The experts of a step's tokens, and the placement of pairs in tiles."""

    chosen: Tensor  # [tokens, used] int32; -1 for a padding token
    own: range  # the experts that this rank holds
    weights: Tensor  # [tokens, used] float32
    places: Tensor  # [tiles * block_m] int32: the pairs of each tile, -1 where it has none
    tile_experts: Tensor  # [tiles] int32: index within `own`; -1: unused tile


@triton.jit
def _keep_groups(ranked, expert, size, GROUPS: tl.constexpr, USED: tl.constexpr, BOTH: tl.constexpr):
    """Set the scores of experts outside the best groups to -inf. A group ranks by its best expert, or its best two."""
    PAD: tl.constexpr = triton.next_power_of_2(GROUPS)
    groups = tl.arange(0, PAD)
    scores = tl.full([PAD], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = tl.where(expert // size == group, ranked, float("-inf"))
        score = tl.max(inside, 0)
        if BOTH:
            score += tl.max(tl.where(expert == tl.argmax(inside, 0), float("-inf"), inside), 0)
        scores = tl.where(groups == group, score, scores)
    kept = expert < 0
    for _ in tl.static_range(USED):
        best = tl.argmax(scores, 0)
        kept |= expert // size == best
        scores = tl.where(groups == best, float("-inf"), scores)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def _choose_kernel(
    logits_ptr, bias_ptr, rows_ptr, factors_ptr, chosen_ptr, weights_ptr, stride, num, scale,
    USED: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert, ranks = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    await_inputs(DEPENDENT)
    is_real = True
    if HAS_ROWS:
        is_real = tl.load(rows_ptr + token) >= 0
    logits = tl.load(logits_ptr + token.to(tl.int64) * stride + expert, mask=(expert < num) & is_real, other=0.0)
    logits = tl.where(expert < num, logits.to(tl.float32), float("-inf"))
    if HAS_BIAS:
        shares = tl.sigmoid(logits)
        ranked = shares + tl.load(bias_ptr + expert, mask=expert < num, other=0.0)
    else:
        shares = tl.exp(logits - tl.max(logits, 0))
        shares = shares / tl.sum(shares, 0)
        ranked = shares
    left = tl.where(expert < num, ranked, float("-inf"))
    if GROUPS_USED < GROUPS:
        left = _keep_groups(left, expert, num // GROUPS, GROUPS, GROUPS_USED, HAS_BIAS)
    chosen, weights = tl.zeros((RANKS,), tl.int32), tl.zeros((RANKS,), tl.float32)
    for rank in tl.static_range(USED):
        best = tl.minimum(tl.argmax(left, 0), num - 1)  # with NaN, argmax must not return an index out of range
        chosen = tl.where(ranks == rank, best, chosen)
        weights = tl.where(ranks == rank, tl.sum(tl.where(expert == best, shares, 0.0), 0), weights)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALIZED:
        weights = weights / (tl.sum(weights, 0) + SMALLEST_SUM)
    if HAS_FACTORS:
        weights *= tl.load(factors_ptr + chosen)
    chosen = tl.where(is_real, chosen, -1)
    tl.store(chosen_ptr + token * USED + ranks, chosen, mask=ranks < USED)
    tl.store(weights_ptr + token * USED + ranks, weights * scale, mask=ranks < USED)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_kernel(
    chosen_ptr, places_ptr, tile_experts_ptr, pairs, first, num, tiles,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Place pairs in tiles: one program for each of `num` experts from `first` on, and one for the unused tiles."""
    mine = tl.program_id(0)
    bins, pair = tl.arange(0, BINS), tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + pair, mask=start + pair < pairs, other=-1)
        chosen -= first
        counts += tl.histogram(tl.where((chosen < 0) | (chosen >= num), num, chosen), BINS)
    needed = tl.where(bins < num, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    begin = tl.sum(tl.where(bins < mine, needed, 0), 0)
    end = tl.where(mine == num, tiles, begin + tl.sum(tl.where(bins == mine, needed, 0), 0))
    name = tl.where(mine == num, -1, mine)
    for start in range(begin, end, TILES):
        tile = start + tl.arange(0, TILES)
        tl.store(tile_experts_ptr + tile, tl.zeros((TILES,), tl.int32) + name, mask=tile < end)
    if (mine < num) & (begin < end):
        place = begin * BLOCK_M
        for start in range(0, pairs, BLOCK):
            chosen = tl.load(chosen_ptr + start + pair, mask=start + pair < pairs, other=-1)
            is_mine = (chosen - first == mine).to(tl.int32)
            at = place + tl.cumsum(is_mine, 0) - 1
            tl.store(places_ptr + at, start + pair, mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
        rest = place + tl.arange(0, BLOCK_M)
        tl.store(places_ptr + rest, tl.zeros((BLOCK_M,), tl.int32) - 1, mask=rest < end * BLOCK_M)


@triton.jit
def store_pairs(
    acc, acc_up, bias_ptr, row, out_ptr, out_stride, pair, n, N, limit, alpha, shift,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Epilogue: store a tile [outputs, pairs] with bias and gate. row: each output's row in the bias; N + row is its
    gate's."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            acc_up += tl.load(bias_ptr + row + N).to(tl.float32)[:, None]
        if CLAMPED:
            acc = clamped(acc, acc_up, limit, alpha, shift)
        else:
            acc = activate(acc, KIND) * acc_up
    at = out_ptr + pair[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (pair >= 0)[None, :])


@triton.jit(do_not_specialize=["tiles", "num_x", "first_expert", "num_experts"])
def _grouped_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, places_ptr, tile_experts_ptr, tiles, first_expert, num_experts,
    num_x, N, K, x_stride, w_stride, out_stride, limit, alpha, shift,
    USED: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    begin = program // (TOGETHER * columns) * TOGETHER  # of the tiles in this group
    num_tiles = tl.minimum(tiles - begin, TOGETHER)
    number = program - begin * columns
    tile = begin + number % num_tiles
    n, k = number // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    await_inputs(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tile) - first_expert
    if (expert >= 0) & (expert < num_experts):
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(places_ptr + place)
        # Unused rows of a tile load different rows of x: a single row loaded by all is slow.
        x_row = tl.where(pair >= 0, pair // USED, place % num_x).to(tl.int64)
        first = expert.to(tl.int64) * (2 * N if GATED else N)  # of the expert's weight rows
        w_row = first + tl.minimum(n, N - 1)
        x_at = x_ptr + x_row[None, :] * x_stride + k[:, None]
        w_at = w_ptr + w_row[:, None] * w_stride + k[None, :]
        up_at = w_ptr + (w_row + N)[:, None] * w_stride + k[None, :]
        acc, acc_up = sum_tiles(
            x_at, w_at, up_at, k, K, tl.cdiv(K, BLOCK_K), BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, PRECISION, 0
        )  # fmt: skip
        if HAS_SCALE:
            acc *= tl.load(scale_ptr + w_row)[:, None]
            if GATED:
                acc_up *= tl.load(scale_ptr + w_row + N)[:, None]
        store_pairs(
            acc, acc_up, bias_ptr, w_row, out_ptr, out_stride, pair, n, N, limit, alpha, shift, GATED, HAS_BIAS,
            CLAMPED, KIND,
        )  # fmt: skip


@triton.jit
def _combine_kernel(
    y_ptr, chosen_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, size, first, end, shared_stride, gate_stride,
    USED: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    await_inputs(DEPENDENT)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(USED):
        pair = token * USED + rank
        chosen = tl.load(chosen_ptr + pair)
        is_own = (chosen >= first) & (chosen < end)  # rows of other experts in y are uninitialized
        y = tl.load(y_ptr + pair * size + column, mask=inside & is_own, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + pair)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared *= tl.sigmoid(tl.load(gate_ptr + token * gate_stride).to(tl.float32))
        total += shared
    tl.store(out_ptr + token * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def most_tiles(pairs: int, num: int, block_m: int) -> int:
    """Return the largest number of tiles that `pairs` pairs can need: each expert may have one partly filled tile."""
    return min(pairs, pairs // block_m + min(pairs, num))


def choose_grouped_tilings(
    pairs: int, num: int, x_bytes: int, device: torch.device
) -> tuple[GroupedTiling, GroupedTiling]:
    """Choose the tilings of gate-up and of down: tiles hold 1.5 times an expert's average share, so that few experts
    need two; the rest was tuned on an H200.

    Both have the same block_m, since they share a routing.
    """
    share, line = -(-pairs // num), 128 // x_bytes
    block_m = max(16, min(128, power_of_two(share + share // 2)))
    if block_m == 128:
        tilings = GroupedTiling(128, 128, line, 8, 4), GroupedTiling(128, 128, line, 8, 3, together=1)
    elif block_m == 64:
        tilings = GroupedTiling(64, 64, 2 * line, 4, 4), GroupedTiling(64, 128, line, 4, 3)
    elif block_m == 32:
        tilings = GroupedTiling(32, 64, 2 * line, 4, 4), GroupedTiling(32, 64, 2 * line, 4, 4)
    else:
        tilings = (GroupedTiling(16, 64, 2 * line, 4, 5),) * 2
    first, second = tilings
    return _limit_stages(first, 2, x_bytes, device), _limit_stages(second, 1, x_bytes, device)


def _limit_stages(tiling: GroupedTiling, weights: int, x_bytes: int, device: torch.device) -> GroupedTiling:
    """Limit the pipeline stages to the device's shared memory, with `weights` weight tiles per stage."""
    stage = (weights * tiling.block_n + tiling.block_m) * tiling.block_k * x_bytes
    return tiling._replace(stages=max(1, min(tiling.stages, shared_memory(device) // stage)))


def route(
    logits: Tensor,  # [tokens, experts], of any float dtype
    num_used: int,
    tiling: GroupedTiling,
    *,
    is_normalized: bool,  # the weights of a token's experts are divided by their sum
    scale: float = 1.0,  # multiplied into the weights
    factors: Tensor | None = None,  # [experts] float32: multiplied into each expert's weight
    rows: Tensor | None = None,  # [tokens] int: negative for a padding token, which is not routed
    groups: tuple[int, int] = (1, 1),  # number of expert groups, and how many of them a token may use
    score_bias: Tensor | None = None,  # [experts] float32: experts rank by sigmoid + bias, groups by their top two
    own: range | None = None,  # the experts that this rank computes; None: all
    dependent: bool = False,
) -> Routing:
    """Route tokens to their top experts, weighted by the softmax over all experts or, with a bias, by the sigmoids
    without it, and place their pairs in tiles."""
    tokens, num = logits.shape
    device, pairs = logits.device, tokens * num_used
    check_rows(logits, "logits")
    check(1 <= num_used <= num, "each token has at least one expert, and no expert twice")
    check(rows is None or (rows.shape == (tokens,) and rows.is_contiguous()), "rows: a number per token")
    check(factors is None or (factors.shape == (num,) and factors.is_contiguous()), "factors: a number per expert")
    check(pairs + num * tiling.block_m < 1 << 31, "at most 2**31 pairs")
    check(score_bias is None or (score_bias.shape == (num,) and score_bias.is_contiguous()), "bias: one per expert")
    check(num % groups[0] == 0, "groups are of equal size")
    own = range(num) if own is None else own
    check(0 <= own.start < own.stop <= num and own.step == 1, "own: consecutive experts")
    tiles = most_tiles(pairs, len(own), tiling.block_m)
    chosen = torch.empty(tokens, num_used, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, num_used, dtype=torch.float32, device=device)
    places = torch.empty(tiles * tiling.block_m, dtype=torch.int32, device=device)
    routing = Routing(chosen, own, weights, places, torch.empty(tiles, dtype=torch.int32, device=device))
    if tokens == 0:
        return routing
    block = power_of_two(num)
    _choose_kernel[(tokens,)](
        logits, score_bias, rows, factors, chosen, weights, logits.stride(0), num, scale,
        USED=num_used, NORMALIZED=is_normalized, GROUPS=groups[0], GROUPS_USED=groups[1],
        HAS_BIAS=score_bias is not None, HAS_ROWS=rows is not None, HAS_FACTORS=factors is not None,
        BLOCK=block, RANKS=power_of_two(num_used), DEPENDENT=dependent,
        num_warps=warps_for(block), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    block, bins = (
        max(_FEWEST_AT_ONCE, min(power_of_two(pairs), _MOST_AT_ONCE)),
        max(_FEWEST_BINS, power_of_two(len(own) + 1)),
    )
    _place_kernel[(len(own) + 1,)](
        chosen, places, routing.tile_experts, pairs, own.start, len(own), tiles,
        BLOCK=block, BINS=bins, BLOCK_M=tiling.block_m, TILES=_TILES_AT_ONCE, DEPENDENT=dependent,
        num_warps=4 if block < _MOST_AT_ONCE else 8, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return routing


def grouped_gemm(
    x: Tensor,  # [tokens, inputs], or [pairs, inputs] with num_used = 1
    stack: Stack,
    routing: Routing,
    tiling: GroupedTiling,
    *,
    num_used: int,  # pairs per row of x
    activation: str | None = None,  # of ACTIVATIONS: weights are gate, then up, and the result is activation(gate) * up
    clamp: Clamp | None = None,  # of the gated activation
    first: int = 0,  # index of the stack's first expert within `own`; other experts' pairs are skipped
    out: Tensor | None = None,  # [pairs, outputs]
    dependent: bool = False,
) -> Tensor:  # [pairs, outputs]
    """Multiply each pair's row by the weight of its expert, accumulating in float32. Rows of padding pairs, and of
    experts outside `routing.own`, are not written."""
    weight, scale, bias = stack
    num, rows, inputs = weight.shape
    own = len(routing.own)  # without `out`, pairs of experts outside the stack would be left unwritten
    check(num == own if out is None else first + num <= own, "a matrix of each of the routing's own experts")
    outputs, pairs = rows // (1 if activation is None else 2), routing.chosen.numel()
    check_rows(x, "x")
    check(x.shape == (pairs // num_used, inputs), "x is [pairs / num_used, inputs]")
    check(weight.is_contiguous() and weight.dtype in (x.dtype, FLOAT8), "the weight has x's dtype or is float8")
    check((weight.dtype == FLOAT8) == (scale is not None), "a float8 weight and its scale come together")
    check(scale is None or (scale.shape == (num, rows) and scale.is_contiguous()), "scale: a number per output")
    check(bias is None or (bias.shape == (num, rows) and bias.is_contiguous()), "bias: a number per output")
    check(clamp is None or activation is not None, "a clamp is of a gate")
    limit, alpha, shift = clamp or Clamp(0.0)
    if out is None:
        out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    check(out.shape == (pairs, outputs) and out.is_contiguous(), "out is [pairs, outputs]")
    if pairs == 0:
        return out
    tiles = len(routing.tile_experts)
    _grouped_kernel[(tiles * triton.cdiv(outputs, tiling.block_n),)](
        x, weight, scale, bias, out, routing.places, routing.tile_experts, tiles, first, num, len(x), outputs, inputs,
        x.stride(0), inputs, outputs, limit, alpha, shift,
        USED=num_used, TOGETHER=tiling.together, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        GATED=activation is not None, KIND=ACTIVATIONS[activation or "silu"], CLAMPED=clamp is not None,
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None,
        EVEN_K=inputs % tiling.block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        DEPENDENT=dependent, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=dependent,
    )  # fmt: skip
    return out


def combine(
    y: Tensor,  # [pairs, size]
    routing: Routing,
    *,
    shared: Tensor | None = None,  # [tokens, size]: output of the shared expert, added
    gate: Tensor | None = None,  # [tokens, 1]: logits of the sigmoid that `shared` is multiplied by
    dependent: bool = False,
) -> Tensor:  # [tokens, size], of y's dtype
    """Return the weighted sum of each token's pairs with `routing.own` experts, in the order of rank, in float32."""
    (tokens, num_used), size = routing.chosen.shape, y.shape[1]
    check(y.is_contiguous() and len(y) == tokens * num_used, "y is [pairs, size]")
    check(shared is None or (shared.shape == (tokens, size) and shared.stride(1) == 1), "shared is [tokens, size]")
    check(gate is None or (shared is not None and gate.shape == (tokens, 1)), "gate is [tokens, 1], of `shared`")
    out = torch.empty(tokens, size, dtype=y.dtype, device=y.device)
    if tokens == 0:
        return out
    block = min(power_of_two(size), _COLUMNS)
    _combine_kernel[(tokens, triton.cdiv(size, block))](
        y, routing.chosen, routing.weights, shared, gate, out, size, routing.own.start, routing.own.stop,
        0 if shared is None else shared.stride(0), 0 if gate is None else gate.stride(0),
        USED=num_used, HAS_SHARED=shared is not None, HAS_GATE=gate is not None, BLOCK=block, DEPENDENT=dependent,
        num_warps=warps_for(block), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out
