"""Grouped gemm of experts with 4-bit weights: integers with group scales, or e2m1 codes (MXFP4).

Pairs are placed by `grouped.route`, and weights are packed as in `gemm_w4`, one expert after the other, so
decode steps read a quarter of the bytes of 16-bit weights. For steps with many pairs per expert, the weights of some
experts at a time are dequantized first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_w4 import PANEL, STEP, PackedW4, expand_w4
from quire.kernels.triton.gemm_w4_steps import sum_steps
from quire.kernels.triton.grouped import (
    GroupedTiling,
    Routing,
    Stack,
    choose_grouped_tilings,
    grouped_gemm,
    store_pairs,
)
from quire.kernels.triton.launch import INTERPRETED, await_inputs, check, check_rows, num_processors, power_of_two

_MOST_ROWS = 64  # rows of a tile; larger tiles use dequantized weights
_EXPANDED_PAIRS = 384  # pairs per expert above which weights are dequantized
_FEWEST_ROWS = 16
_FEWEST_PROGRAMS = 2  # programs per multiprocessor from which tiles of two panels are faster
_EXPANDED_BYTES = 256 << 20  # bytes of dequantized weights at a time


class W4Stack(NamedTuple):
    """One 4-bit weight matrix per expert: (value - 8) * scale + offset, or the e2m1 value of a code times the scale."""

    data: Tensor  # [experts, panels, steps, 64, 32] int16, see PackedW4
    scales: Tensor  # [experts, groups, outputs padded to whole panels]
    offsets: Tensor | None  # likewise
    outputs: int
    inputs: int
    group: int  # inputs per scale: 32, 64 or whole steps
    has_codes: bool  # e2m1 codes, not integers
    bias: Tensor | None = None  # [experts, outputs]

    @classmethod
    def of(cls, experts: Sequence[PackedW4], bias: Tensor | None, *, has_codes: bool) -> W4Stack:
        """Stack the packed weights of all experts, which must be alike."""
        first = experts[0]
        offsets = None
        if first.offsets is not None:
            offsets = torch.stack([each.offsets for each in experts if each.offsets is not None])
        return cls(
            torch.stack([each.data for each in experts]), torch.stack([each.scales for each in experts]), offsets,
            first.outputs, first.inputs, first.group, has_codes, bias,
        )  # fmt: skip

    def experts(self) -> Iterator[PackedW4]:
        for number, data in enumerate(self.data):
            offsets = None if self.offsets is None else self.offsets[number]
            yield PackedW4(data, self.scales[number], offsets, self.outputs, self.inputs, self.group)


class _Tile(NamedTuple):
    """Launch parameters of a tile."""

    outputs: int
    stages: int
    folded: bool  # scales and offsets are applied to the weights, which are then rounded to the activations' dtype


def choose_w4_tilings(pairs: int, num: int, x_bytes: int, device: torch.device) -> tuple[GroupedTiling, GroupedTiling]:
    """Choose the tilings of gate-up and of down. With many pairs, the weights are dequantized and the tilings are those
    of 16-bit weights. Else tiles hold 1.25 times an expert's average share: weights are dequantized for each tile
    again, but the empty rows of a tile cost as much as others."""
    first, second = choose_grouped_tilings(pairs, num, x_bytes, device)
    if pairs > num * _EXPANDED_PAIRS:
        return first, second
    share = -(-pairs // num)
    block_m = max(_FEWEST_ROWS, min(_MOST_ROWS, power_of_two(share + share // 4)))
    return first._replace(block_m=block_m), second._replace(block_m=block_m)


def _choose_tile(stack: W4Stack, block_m: int, dtype: torch.dtype, wide_programs: float) -> _Tile:
    """Choose launch parameters, tuned on an H200. Without folding, the sums of each group are scaled separately, which
    is more work than scaling the weights if a step has several groups, or if offsets need sums of inputs.

    wide_programs: programs per multiprocessor with tiles of two panels.
    """
    is_unscalable = stack.has_codes and dtype == torch.float16  # float16 cannot represent all power-of-two scales
    if dtype.itemsize > 2 or is_unscalable or wide_programs < _FEWEST_PROGRAMS:
        return _Tile(PANEL, 3, folded=False)
    if stack.group < STEP or stack.offsets is not None:
        return _Tile(2 * PANEL, 4 if block_m == _FEWEST_ROWS else 3, folded=True)
    return _Tile(2 * PANEL if block_m <= 32 else PANEL, 3, folded=False)


@triton.jit(do_not_specialize=["tiles", "num_x", "K", "total_steps", "group_steps"])
def _grouped_w4_kernel(
    x_ptr, w_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, places_ptr, tile_experts_ptr, tiles, num_x, N, K,
    total_steps, x_stride, w_stride, factor_stride, factors_stride, out_stride, group_steps, limit, alpha, shift,
    USED: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_STEP: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_TAIL: tl.constexpr, FOLDED: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 32  # 16-bit words of an output per step
    program, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    begin = program // (TOGETHER * columns) * TOGETHER  # of the tiles in this group
    num_tiles = tl.minimum(tiles - begin, TOGETHER)
    number = program - begin * columns
    tile = begin + number % num_tiles
    n, word = number // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    await_inputs(DEPENDENT)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(places_ptr + place)
        x_row = tl.where(pair >= 0, pair // USED, place % num_x).to(tl.int64)
        x_at = x_ptr + x_row[None, :] * x_stride + word[:, None]
        w_row = tl.minimum(n, N - 1)
        up_row = w_row + N
        panel_stride = total_steps * (PANEL_ROWS * WORDS)
        w_line = w_row // PANEL_ROWS * panel_stride + w_row % PANEL_ROWS * WORDS
        up_line = up_row // PANEL_ROWS * panel_stride + up_row % PANEL_ROWS * WORDS
        w_at = w_ptr + expert * w_stride + w_line[:, None] + word[None, :]
        up_at = w_ptr + expert * w_stride + up_line[:, None] + word[None, :]
        scale_at = scale_ptr + expert * factors_stride + w_row
        offset_at = offset_ptr + expert * factors_stride + w_row if HAS_OFFSET else scale_at
        acc, acc_up = sum_steps(
            x_at, w_at, up_at, scale_at, offset_at, word, 0, total_steps, N, K, group_steps, factor_stride, BLOCK_M,
            BLOCK_N, PER_STEP, GATED, HAS_OFFSET, HAS_TAIL, FOLDED, CODES, PRECISION, COMPILED,
        )  # fmt: skip
        first = expert * (2 * N if GATED else N)
        store_pairs(
            acc, acc_up, bias_ptr, first + w_row, out_ptr, out_stride, pair, n, N, limit, alpha, shift, GATED,
            HAS_BIAS, CLAMPED, KIND,
        )  # fmt: skip


def grouped_gemm_w4(
    x: Tensor,  # [tokens, inputs], or [pairs, inputs] with num_used = 1
    stack: W4Stack,
    routing: Routing,
    tiling: GroupedTiling,  # the tiling that pairs were placed with; small tiles use only its block_m and `together`
    *,
    num_used: int,  # pairs per row of x
    activation: str | None = None,  # of ACTIVATIONS: weights are gate, then up, and the result is activation(gate) * up
    clamp: Clamp | None = None,  # of the gated activation
    dependent: bool = False,
) -> Tensor:  # [pairs, outputs]
    """Multiply each pair's row by the weight of its expert, accumulating in float32. Rows of padding pairs are not
    written.

    A dequantized weight is rounded to a 16-bit x's dtype if a step has several groups or there are offsets. For e2m1
    codes, whose scales are powers of two, this is exact in bfloat16. float16 cannot represent all scales, so codes are
    scaled after the gemm there.
    """
    if tiling.block_m > _MOST_ROWS:
        return _expanded_gemm(
            x, stack, routing, tiling, num_used=num_used, activation=activation, clamp=clamp, dependent=dependent
        )
    inputs, gated, pairs = stack.inputs, activation is not None, routing.chosen.numel()
    outputs = stack.outputs // (2 if gated else 1)
    check_rows(x, "x")
    check(x.shape == (pairs // num_used, inputs), "x is [pairs / num_used, inputs]")
    check(stack.data.is_contiguous() and stack.scales.is_contiguous(), "the weight is contiguous")
    check(stack.bias is None or stack.bias.is_contiguous(), "bias: a number per output")
    check(clamp is None or gated, "a clamp is of a gate")
    limit, alpha, shift = clamp or Clamp(0.0)
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    tiles, steps, has_offset = len(routing.tile_experts), stack.data.shape[2], stack.offsets is not None
    wide = tiles * triton.cdiv(outputs, 2 * PANEL) / num_processors(x.device)
    tile = _choose_tile(stack, tiling.block_m, x.dtype, wide)
    _grouped_w4_kernel[(tiles * triton.cdiv(outputs, tile.outputs),)](
        x, stack.data, stack.scales, stack.offsets, stack.bias, out, routing.places, routing.tile_experts, tiles,
        len(x), outputs, inputs, steps, x.stride(0), stack.data.stride(0), stack.scales.stride(1),
        stack.scales.stride(0), outputs, max(stack.group // STEP, 1), limit, alpha, shift,
        USED=num_used, TOGETHER=tiling.together, BLOCK_M=tiling.block_m, BLOCK_N=tile.outputs,
        PER_STEP=max(STEP // stack.group, 1), GATED=gated, KIND=ACTIVATIONS[activation or "silu"],
        CLAMPED=clamp is not None, HAS_BIAS=stack.bias is not None, HAS_OFFSET=has_offset,
        HAS_TAIL=inputs % STEP != 0, FOLDED=tile.folded, CODES=stack.has_codes,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", DEPENDENT=dependent, COMPILED=not INTERPRETED,
        num_warps=4, num_stages=tile.stages, launch_pdl=dependent,
    )  # fmt: skip
    return out


def _expanded_gemm(
    x: Tensor, stack: W4Stack, routing: Routing, tiling: GroupedTiling, *, num_used: int,
    activation: str | None, clamp: Clamp | None, dependent: bool,
) -> Tensor:  # fmt: skip
    experts = list(stack.experts())
    return expanded_gemm(
        x, lambda number, out: expand_w4(experts[number], out, has_codes=stack.has_codes),
        (len(stack.data), stack.outputs, stack.inputs), stack.bias, routing, tiling, num_used=num_used,
        activation=activation, clamp=clamp, dependent=dependent,
    )  # fmt: skip


def expanded_gemm(
    x: Tensor, expand: Callable[[int, Tensor], Tensor], shape: tuple[int, int, int], bias: Tensor | None,
    routing: Routing, tiling: GroupedTiling, *, num_used: int, activation: str | None, clamp: Clamp | None,
    dependent: bool,
) -> Tensor:  # fmt: skip
    """Dequantize the weights of some experts at a time to x's dtype, and run the grouped gemm on them. `expand`
    dequantizes one expert's matrix; shape: [experts, outputs, inputs] of all."""
    num, rows, inputs = shape
    at_once = max(1, min(num, _EXPANDED_BYTES // (rows * inputs * x.element_size())))
    numbers = torch.empty(at_once, rows, inputs, dtype=x.dtype, device=x.device)
    outputs = rows // (1 if activation is None else 2)
    out = torch.empty(routing.chosen.numel(), outputs, dtype=x.dtype, device=x.device)
    for first in range(0, num, at_once):
        here = min(at_once, num - first)
        for place in range(here):
            expand(first + place, numbers[place])
        own = None if bias is None else bias[first : first + here]
        grouped_gemm(
            x, Stack(numbers[:here], None, own), routing, tiling, num_used=num_used, activation=activation,
            clamp=clamp, first=first, out=out, dependent=dependent,
        )  # fmt: skip
    return out
