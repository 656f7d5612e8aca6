"""W8A8 gemm of 65 and more rows on Hopper GPUs: a warp-specialized wgmma kernel in Gluon, for int8 and float8.

The weight is the left operand (swap_ab), so a tile is 64 outputs by the rows of a step, with little padding. A producer
warp loads both operands by TMA to a ring of stages; two consumer warpgroups each multiply part of the tile's rows
(wgmma). Programs are persistent over tiles, or compute one split of a tile (split-K). The last program of a tile adds
the splits in the order of K, so the result never depends on timing.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.activation import ACTIVATIONS, activate
from quire.kernels.triton.gemm_scaled_hopper_plan import (
    CONSUMERS,
    MULTIPLE,
    OUTPUTS,
    STEP,
    HopperTiling,
    choose_hopper_tiling,
    takes_weight,
)
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gluon_versions import barrier
from quire.kernels.triton.launch import SMALL, check, check_rows

_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)


@gluon.jit
def _own_work(splits, ksteps):
    """Return a program's first tile, the stride to its next one, its first step of K and its number of steps per
    tile."""
    program = gl.program_id(0)
    steps = (ksteps + splits - 1) // splits
    begin = program % splits * steps
    return program // splits, gl.num_programs(0) // splits, begin, gl.minimum(steps, ksteps - begin)


@gluon.jit
def _load_weight(w_desc, rings, bar, stage, tile, k, row_tiles, N, BYTES: gl.constexpr, GATED: gl.constexpr, pred):
    """Start the TMA copies of one step's weight tiles."""
    n = tile // row_tiles * (64 if GATED else 64 * len(rings))
    mbarrier.expect(bar, BYTES, pred=pred)
    for i in gl.static_range(len(rings)):
        at = [n + i * (N if GATED else 64), k * 128]
        tma.async_copy_global_to_shared(w_desc, at, bar, rings[i].index(stage), pred=pred)


@gluon.jit
def _load_rows(x_descs, rings, bar, stage, tile, k, row_tiles, pred):
    """Start the TMA copies of one step's rows for both consumers."""
    FIRST: gl.constexpr = rings[0].shape[1]
    m = tile % row_tiles * (FIRST + rings[1].shape[1])
    tma.async_copy_global_to_shared(x_descs[0], [m, k * 128], bar, rings[0].index(stage), pred=pred)
    tma.async_copy_global_to_shared(x_descs[1], [m + FIRST, k * 128], bar, rings[1].index(stage), pred=pred)


@gluon.jit
def _producer(
    w_desc, x_descs, w_rings, x_rings, ready, empty, N, row_tiles, tiles, ksteps, splits,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp's code: copy all steps of this program to the ring."""
    STAGES: gl.constexpr = ready.shape[0]
    BYTES: gl.constexpr = 128 * (64 * len(w_rings) + x_rings[0].shape[1] + x_rings[1].shape[1])
    first, stride, begin, count = _own_work(splits, ksteps)
    total = (tiles - first + stride - 1) // stride * count
    for i in gl.static_range(STAGES):  # weights are never written: load before the wait
        tile, k = first + i // count * stride, begin + i % count
        _load_weight(w_desc, w_rings, ready.index(i), i, tile, k, row_tiles, N, BYTES, GATED, i < total)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        tile, k = first + i // count * stride, begin + i % count
        _load_rows(x_descs, x_rings, ready.index(i), i, tile, k, row_tiles, i < total)
    stage, phase = 0, 0
    for i in range(STAGES, total):
        tile, k = first + i // count * stride, begin + i % count
        mbarrier.wait(empty.index(stage), phase)
        _load_weight(w_desc, w_rings, ready.index(stage), stage, tile, k, row_tiles, N, BYTES, GATED, True)
        _load_rows(x_descs, x_rings, ready.index(stage), stage, tile, k, row_tiles, True)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _zeros(ROWS: gl.constexpr, PARTS: gl.constexpr, SUM: gl.constexpr):
    """Return a consumer's zeroed sums [64, rows] for each of PARTS weight tiles."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    sums = ()
    for _ in gl.static_range(PARTS):
        sums += (gl.zeros((64, ROWS), SUM, LAYOUT),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _wait(sums, pending: gl.constexpr):
    """Wait until all but `pending` wgmmas are done. Returns the sums."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(pending, deps=sums),)
    else:  # Triton compiles the code after a return too
        gate, up = warpgroup_mma_wait(pending, deps=sums)
        return (gate, up)


@gluon.jit
def _sum_steps(sums, w_rings, x_ring, ready, empty, stage, phase, count):
    """Add `count` steps to the sums. Returns them with the next stage and its phase."""
    STAGES: gl.constexpr = ready.shape[0]
    used = 0
    for i in range(count):
        mbarrier.wait(ready.index(stage), phase)
        x = x_ring.index(stage).permute((1, 0))
        more = ()
        for p in gl.static_range(len(w_rings)):
            more += (warpgroup_mma(w_rings[p].index(stage), x, sums[p], is_async=True),)  # type: ignore[assignment]
        sums = _wait(more, len(more))
        mbarrier.arrive(empty.index(used), count=1, pred=i > 0)  # the wgmmas of the previous step are done
        used = stage
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    sums = _wait(sums, 0)
    mbarrier.arrive(empty.index(used), count=1)
    return sums, stage, phase


@gluon.jit
def _place(sums):
    """Return the offsets at which a warp stores sums [64, rows] as whole cache lines."""
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))[:, None]
    m = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))[None, :]
    return m // 8 * 512 + n * 8 + m % 8


@gluon.jit
def _join(sums, zeros, partial_ptr, counter, splits, SIZE: gl.constexpr):
    """Split-K reduction: return the sums of all splits of a tile, added in the order of K, and whether this program has
    them. The program that arrives last does. SIZE: elements from one split to the next."""
    PART: gl.constexpr = 64 * sums[0].shape[1]
    program, place = gl.program_id(0), _place(sums[0])
    mine = partial_ptr + program.to(gl.int64) * SIZE + place
    for i in gl.static_range(len(sums)):
        gl.store(mine + i * PART, sums[i].to(gl.float32, bitcast=True))
    barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        gl.store(counter, 0)
        sums = zeros
        first = program // splits * splits
        for split in range(splits):
            part = partial_ptr + (first + split).to(gl.int64) * SIZE + place
            more = ()
            for i in gl.static_range(len(sums)):
                more += (sums[i] + gl.load(part + i * PART, cache_modifier=".cg").to(sums[i].dtype, bitcast=True),)  # type: ignore[assignment]
            sums = more
    return sums, last


@gluon.jit
def _scaled(sums, n, m, M, N, start, bias_ptr, x_scale_ptr, w_scale_ptr, HAS_BIAS: gl.constexpr):
    """Return the sums in float32 with scales and bias applied. `start`: the first weight row of these outputs (N for
    up)."""
    rows = m + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    outputs = n + gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
    value = sums.to(gl.float32) * gl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)[None, :]
    value *= gl.load(w_scale_ptr + start + outputs, mask=outputs < N, other=0.0)[:, None]
    if HAS_BIAS:
        value += gl.load(bias_ptr + start + outputs, mask=outputs < N, other=0.0).to(gl.float32)[:, None]
    return value


@gluon.jit
def _store(value, n, m, M, N, out_ptr, residual_ptr, out_stride, residual_stride, HAS_RESIDUAL: gl.constexpr):
    """Store value [64, rows] to out [M, N], 32 rows at a time, after a change of layout that makes outputs
    contiguous."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if value.shape[1] > 32:
        left, right = value.reshape(64, 2, value.shape[1] // 2).permute(0, 2, 1).split()
        _store(left, n, m, M, N, out_ptr, residual_ptr, out_stride, residual_stride, HAS_RESIDUAL)
        half = m + value.shape[1] // 2
        _store(right, n, half, M, N, out_ptr, residual_ptr, out_stride, residual_stride, HAS_RESIDUAL)
    else:
        value = gl.convert_layout(value, LAYOUT)
        rows = m + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :].to(gl.int64)
        outputs = n + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        inside = (outputs < N) & (rows < M)
        if HAS_RESIDUAL:
            value += gl.load(residual_ptr + rows * residual_stride + outputs, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + rows * out_stride + outputs, value.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consumer(
    w_rings, x_ring, ready, empty, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, partial_ptr, counter_ptr,
    M, N, row_tiles, tiles, ksteps, splits, out_stride, residual_stride, CONSUMER: gl.constexpr, BEFORE: gl.constexpr,
    TILE: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup's code. TILE: rows of a tile. BEFORE: rows of the tile that the other consumer computes."""
    PARTS: gl.constexpr = len(w_rings)
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    if PDL:
        gdc_wait()
    first, stride, _, count = _own_work(splits, ksteps)
    stage, phase = 0, 0
    for tile in range(first, tiles, stride):
        zeros = _zeros(x_ring.shape[1], PARTS, SUM)
        sums, stage, phase = _sum_steps(zeros, w_rings, x_ring, ready, empty, stage, phase, count)
        last = True
        if splits > 1:
            own, counter = partial_ptr + 64 * PARTS * BEFORE, counter_ptr + tile * 2 + CONSUMER
            sums, last = _join(sums, zeros, own, counter, splits, 64 * PARTS * TILE)
        if last:
            n, m = tile // row_tiles * (64 if GATED else 64 * PARTS), tile % row_tiles * TILE + BEFORE
            for i in gl.static_range(1 if GATED else PARTS):
                value = _scaled(sums[i], n + 64 * i, m, M, N, 0, bias_ptr, x_scale_ptr, w_scale_ptr, HAS_BIAS)
                if GATED:
                    up = _scaled(sums[1], n, m, M, N, N, bias_ptr, x_scale_ptr, w_scale_ptr, HAS_BIAS)
                    value = activate(value, KIND) * up
                _store(value, n + 64 * i, m, M, N, out_ptr, residual_ptr, out_stride, residual_stride, HAS_RESIDUAL)


@gluon.jit(do_not_specialize=["M", "row_tiles", "tiles", "ksteps", "splits"])
def _scaled_kernel(
    w_desc, first_desc, second_desc, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, partial_ptr,
    counter_ptr, M, N, row_tiles, tiles, ksteps, splits, out_stride, residual_stride,
    STAGES: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory and barriers, and start the specialized warps."""
    DTYPE: gl.constexpr = w_desc.dtype
    FIRST: gl.constexpr = first_desc.block_type.shape[0]
    SECOND: gl.constexpr = second_desc.block_type.shape[0]
    TILE: gl.constexpr = FIRST + SECOND
    w_rings = (gl.allocate_shared_memory(DTYPE, [STAGES, 64, 128], w_desc.layout),)
    if PARTS == 2:
        w_rings += (gl.allocate_shared_memory(DTYPE, [STAGES, 64, 128], w_desc.layout),)  # type: ignore[assignment]
    first = gl.allocate_shared_memory(DTYPE, [STAGES, FIRST, 128], first_desc.layout)
    second = gl.allocate_shared_memory(DTYPE, [STAGES, SECOND, 128], second_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (w_rings, first, ready, empty, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr,
                     partial_ptr, counter_ptr, M, N, row_tiles, tiles, ksteps, splits, out_stride, residual_stride,
                     0, 0, TILE, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, PDL)),
        (_consumer, (w_rings, second, ready, empty, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr,
                     partial_ptr, counter_ptr, M, N, row_tiles, tiles, ksteps, splits, out_stride, residual_stride,
                     1, FIRST, TILE, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, PDL)),
        (_producer, (w_desc, (first_desc, second_desc), w_rings, (first, second), ready, empty, N, row_tiles, tiles,
                     ksteps, splits, GATED, PDL)),
    ], [4, 1], [232, 24])  # fmt: skip


def scaled_gemm(
    x: Tensor,  # [M, K] float8 or int8
    weight: Tensor,  # [N, K] of x's dtype; [2 * N, K], gate then up, with an activation
    workspace: Workspace,
    *,
    x_scale: Tensor,  # [M] float32
    weight_scale: Tensor,  # [weight rows] float32
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    out: Tensor,  # [M, N]
    tiling: HopperTiling | None = None,  # by default chosen for the shape
    dependent: bool = False,
) -> Tensor:
    """Return x @ weight.T with its epilogue. int8 is accumulated exactly; float8 accumulates in the tensor cores, which
    keep fewer bits than float32, as in cuBLAS. The epilogue is float32, rounded once.

    Deterministic: the same inputs always give the same bits. dependent: programmatic dependent launch; then the
    previous kernel must not write the weight, which is loaded before that kernel ends.
    """
    (rows, inputs), gated = x.shape, activation is not None
    outputs = weight.shape[0] // (2 if gated else 1)
    check_rows(x, "x")
    check_rows(weight, "weight")
    check(x.dtype == weight.dtype and x.dtype in SMALL, "x and weight are both int8 or both float8")
    check(weight.shape[1] == inputs and takes_weight(weight), "K and N are multiples of 16, on a Hopper GPU")
    check(x.stride(0) % MULTIPLE == 0 and x.data_ptr() % MULTIPLE == 0, "rows of x begin at multiples of 16 bytes")
    check(out.shape == (rows, outputs) and out.stride(1) == 1, "out is [M, N]")
    check(residual is None or (residual.shape == out.shape and residual.stride(1) == 1), "residual is [M, N]")
    if rows == 0:
        return out
    tiling = tiling or choose_hopper_tiling(rows, outputs, inputs, gated, x.device)
    check(tiling.parts == 2 or not gated, "a gate takes two parts")
    ksteps, row_tiles = triton.cdiv(inputs, STEP), triton.cdiv(rows, tiling.rows)
    tiles = triton.cdiv(outputs, OUTPUTS if gated else OUTPUTS * tiling.parts) * row_tiles
    programs = tiles * tiling.splits if tiling.splits > 1 else triton.cdiv(tiles, tiling.tiles)
    if tiling.splits > 1:
        check((tiling.splits - 1) * triton.cdiv(ksteps, tiling.splits) < ksteps, "every split has a step of K")
        needed = programs * OUTPUTS * tiling.rows * tiling.parts
        fits = needed <= workspace.partials.numel() and CONSUMERS * tiles <= workspace.counters.numel()
        check(fits, f"the workspace is too small: {needed} partial sums, {CONSUMERS * tiles} counters")
    _scaled_kernel[(programs,)](
        _descriptor(weight, OUTPUTS), _descriptor(x, tiling.first), _descriptor(x, tiling.second),
        out, bias, residual, x_scale, weight_scale, workspace.partials, workspace.counters,
        rows, outputs, row_tiles, tiles, ksteps, tiling.splits, out.stride(0),
        0 if residual is None else residual.stride(0),
        STAGES=tiling.stages, PARTS=tiling.parts, GATED=gated, KIND=ACTIVATIONS[activation or "silu"],
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PDL=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return out


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, STEP], _LAYOUT)
