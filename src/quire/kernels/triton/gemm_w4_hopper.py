"""Gemm of 9 to 256 rows with a 4-bit weight (W4A16) on Hopper GPUs: a warp-specialized wgmma kernel in Gluon.

See `gemm_w4` for the packing. A producer warp copies words, scales and rows to a ring of stages in shared
memory by TMA; the weight's copies start before it waits for the previous kernel. Two consumer warpgroups dequantize
words to bfloat16 in registers, which are the left operand of wgmma: one half of a step is dequantized while the gemm of
the half before runs. Scales and offsets are folded into the weights.

The steps of all tiles are distributed evenly over the programs (stream-K), so a program's steps may begin and end
within tiles. Programs that share a tile add their sums pairwise by a fixed tree, so the result never depends on timing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import PARTIAL_SUMS
from quire.kernels.triton.gemm_w4 import PANEL, STEP, PackedW4
from quire.kernels.triton.gemm_w4_hopper_steps import TILE, consume, produce
from quire.kernels.triton.launch import check, check_rows, has_gluon, num_processors, power_of_two

FEWEST_ROWS, MOST_ROWS = 9, 256  # for which it was measured to be the fastest kernel
_PANELS = 2  # panels of a tile: one per consumer warpgroup
_STAGES = {16: 8, 32: 7, 64: 6, 128: 3}  # by the rows of a tile: as many as fit in shared memory
_ALIGNED = 16  # bytes
_MOST_FRAGMENTS = 4  # tiles per program, for which the kernel unrolls its code
_WARPS = 8
_X_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
_WORD_LAYOUT = gl.NVMMASharedLayout(64, 16, 4)
_FACTOR_LAYOUT = gl.NVMMASharedLayout(0, 16, 3)


class WgmmaPlan(NamedTuple):
    """Launch parameters of this kernel."""

    block_m: int  # rows per tile
    stages: int
    row_tiles: int
    tiles: int
    steps_per_program: int
    fragments: int  # the largest number of tiles that a program has steps of
    levels: int  # of the tree by which the programs of a tile add their sums

    def programs(self, steps: int) -> int:
        return -(-self.tiles * steps // self.steps_per_program)


@gluon.jit(do_not_specialize=["M", "row_tiles", "total", "per_program"])
def _wgmma_kernel(
    x_desc, w_desc, s_desc, o_desc, out_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr, M, N, total_steps,
    row_tiles, total, per_program, out_stride, residual_stride,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PER_STEP: gl.constexpr, GROUP_STEPS: gl.constexpr,
    FRAGMENTS: gl.constexpr, LEVELS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_OFFSET: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    w_layout: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, HALVES, 2 // HALVES, 64, 32], w_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.float16, [STAGES, PER_STEP, HALVES, TILE // HALVES], s_desc.layout)
    o_ring = s_ring
    if HAS_OFFSET:
        o_ring = gl.allocate_shared_memory(gl.float16, [STAGES, PER_STEP, HALVES, TILE // HALVES], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    words = w_ring._reinterpret(gl.int16, [STAGES, TILE, 32], w_layout)
    scales = s_ring._reinterpret(gl.float16, [STAGES * PER_STEP, TILE], plain)
    offsets = o_ring._reinterpret(gl.float16, [STAGES * PER_STEP, TILE], plain)
    gl.warp_specialize(
        [
            (consume, (
                full, empty, x_ring, words, scales, offsets, out_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
                M, N, total_steps, row_tiles, total, per_program, out_stride, residual_stride, BLOCK_M, STAGES,
                PER_STEP, FRAGMENTS, LEVELS, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, HAS_OFFSET, DEPENDENT,
            )),
            (produce, (
                full, empty, x_ring, w_ring, s_ring, o_ring, x_desc, w_desc, s_desc, o_desc, M, total_steps, row_tiles,
                total, per_program, BLOCK_M, STAGES, PER_STEP, GROUP_STEPS, GATED, HAS_OFFSET, DEPENDENT,
            )),
        ],
        [1], [32],
    )  # fmt: skip


def takes_wgmma(x: Tensor, weight: PackedW4, activation: str | None) -> bool:
    """Whether this kernel supports x and the weight: 9 to 256 aligned bfloat16 rows and float16 scales on a Hopper
    GPU."""
    return (
        FEWEST_ROWS <= x.shape[0] <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and weight.scales.dtype == torch.float16
        and x.data_ptr() % _ALIGNED == x.stride(0) % (_ALIGNED // 2) == 0
        and (activation is None or weight.outputs % (2 * PANEL) == 0)
        and has_gluon(x.device)
    )


def gemm_w4_hopper(
    x: Tensor,  # [M, K], see `takes_wgmma`
    weight: PackedW4,  # [N, K]; [2 * N, K], gate then up, with an activation
    out: Tensor,  # [M, N]
    workspace: Workspace,
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    plan: WgmmaPlan | None = None,  # by default chosen for the shape
    dependent: bool = False,
) -> Tensor:
    """Return x @ weight.T with its epilogue. Dequantized weights are rounded to bfloat16; sums and the epilogue are in
    float32, rounded once."""
    rows, inputs = x.shape
    check_rows(x, "x")
    check_rows(out, "out")
    gated, steps = activation is not None, weight.data.shape[1]
    outputs = weight.outputs // (2 if gated else 1)
    check(takes_wgmma(x, weight, activation) and inputs == weight.inputs, "x and weight are as `takes_wgmma` requires")
    check(out.shape == (rows, outputs), "out is [M, N]")
    check(residual is None or (residual.shape == out.shape and residual.stride(1) == 1), "residual is [M, N]")
    plan = plan or choose_wgmma_plan(rows, outputs, steps, gated, num_processors(x.device))
    w_desc, s_desc, o_desc = _descriptors(weight, gated)
    x_desc = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [plan.block_m, STEP], _X_LAYOUT)
    _wgmma_kernel[(plan.programs(steps),)](
        x_desc, w_desc, s_desc, o_desc, out, bias, residual, workspace.partials, workspace.counters, rows, outputs,
        steps, plan.row_tiles, plan.tiles * steps, plan.steps_per_program, out.stride(0),
        0 if residual is None else residual.stride(0), BLOCK_M=plan.block_m, STAGES=plan.stages,
        PER_STEP=max(STEP // weight.group, 1), GROUP_STEPS=max(weight.group // STEP, 1), FRAGMENTS=plan.fragments,
        LEVELS=plan.levels, GATED=gated, KIND=ACTIVATIONS[activation or "silu"], HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, HAS_OFFSET=weight.offsets is not None, DEPENDENT=dependent,
        num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
    return out


def _descriptors(weight: PackedW4, gated: bool) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Return TMA descriptors of words, scales and offsets, whose boxes hold one step of a tile. A gated tile is a panel
    of the gate and one of the up weights."""
    (count, steps), halves = weight.data.shape[:2], 2 if gated else 1
    words, parts, panels = steps * PANEL * 32, count // halves, _PANELS // halves  # words: 16-bit words of a panel
    w_desc = TensorDescriptor(
        weight.data, [halves, parts, steps * PANEL, 32], [parts * words, words, 32, 1], [halves, panels, PANEL, 32],
        _WORD_LAYOUT,
    )  # fmt: skip
    groups, padded = weight.scales.shape
    shape, strides = [groups, halves, padded // halves], [padded, padded // halves, 1]
    block = [max(STEP // weight.group, 1), halves, panels * PANEL]
    s_desc = TensorDescriptor(weight.scales, shape, strides, block, _FACTOR_LAYOUT)
    if weight.offsets is None:
        return w_desc, s_desc, s_desc
    return w_desc, s_desc, TensorDescriptor(weight.offsets, shape, strides, block, _FACTOR_LAYOUT)


@lru_cache(maxsize=4096)
def choose_wgmma_plan(rows: int, outputs: int, steps: int, gated: bool, processors: int) -> WgmmaPlan:
    """Choose a plan with one program per multiprocessor, all with equally many steps; fewer programs if the workspace
    is too small for their partial sums."""
    block_m = min(max(16, power_of_two(rows)), max(_STAGES))
    row_tiles = -(-rows // block_m)
    tiles = -(-outputs // (_PANELS * PANEL // (2 if gated else 1))) * row_tiles
    programs = min(processors, PARTIAL_SUMS // (2 * _PANELS * PANEL * block_m))
    each = min(-(-tiles * steps // programs), _MOST_FRAGMENTS * steps)
    most = max(
        (tile + 1) * steps // each + ((tile + 1) * steps % each > 0) - tile * steps // each for tile in range(tiles)
    )
    aligned = steps % each == 0 or each % steps == 0
    fragments = -(-each // steps) if aligned else -(-(each - 1) // steps) + 1
    return WgmmaPlan(block_m, _STAGES[block_m], row_tiles, tiles, each, fragments, (most - 1).bit_length())
