"""Device code of `gemm_w4_hopper`: the producer warp, the consumer warpgroups, and the reduction of partial sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.activation import activate
from quire.kernels.triton.gluon_versions import barrier

TILE = gl.constexpr(128)  # outputs: 64 per consumer warpgroup

# Two quarters of a word: a half with the upper bits of 128 and a quantized value in its lower bits is the float 128 +
# value.
_DECODE = """{{
    .reg .b32 low, high, less;
    mov.b32 less, 0xC308C308;
    shr.u32 low, $2, {shift};
    shr.u32 high, $2, {shift} + 4;
    lop3.b32 $0, low, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, high, 0x000F000F, 0x43004300, 0xEA;
    add.rn.bf16x2 $0, $0, less;
    add.rn.bf16x2 $1, $1, less;
    {scale}
}}"""
_MUL = "mul.rn.bf16x2 $0, $0, $3; mul.rn.bf16x2 $1, $1, $4;"
_FMA = "fma.rn.bf16x2 $0, $0, $3, $5; fma.rn.bf16x2 $1, $1, $4, $6;"
_FIRST, _SECOND = (gl.constexpr(_DECODE.format(shift=shift, scale=_MUL)) for shift in (0, 8))
_FIRST_OFFSET, _SECOND_OFFSET = (gl.constexpr(_DECODE.format(shift=shift, scale=_FMA)) for shift in (0, 8))
_OPERANDS, _OFFSET_OPERANDS = gl.constexpr("=&r,=&r,r,r,r"), gl.constexpr("=&r,=&r,r,r,r,r,r")

# A store that never executes, after the wait for a wgmma: without it, ptxas would reuse the registers of the left
# operand as soon as the wgmma is issued, while it still reads them.
_HOLD = gl.constexpr("""{
    .reg .pred never;
    .reg .b32 size;
    mov.u32 size, %nctaid.z;
    setp.eq.u32 never, size, 0x7FFFFFF;
    @never st.shared.v4.b32 [size], {$4, $5, $6, $7};
    @never st.shared.v4.b32 [size], {$8, $9, $10, $11};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
}""")
_HELD = gl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r")


@gluon.jit
def _factors(ring, stage, PER_STEP: gl.constexpr, dot: gl.constexpr):
    """Load the scales or offsets of the quarters of a step, each [TILE, 32]."""
    column: gl.constexpr = gl.SliceLayout(1, dot)
    f0 = gl.expand_dims(ring.index(stage * PER_STEP).load(column).to(gl.bfloat16), 1).broadcast_to([TILE, 32])
    f1, f2, f3 = f0, f0, f0
    if PER_STEP > 1:
        third = ring.index(stage * PER_STEP + PER_STEP // 2).load(column)
        f2 = gl.expand_dims(third.to(gl.bfloat16), 1).broadcast_to([TILE, 32])
        f3 = f2
    if PER_STEP > 2:
        second, fourth = ring.index(stage * 4 + 1).load(column), ring.index(stage * 4 + 3).load(column)
        f1 = gl.expand_dims(second.to(gl.bfloat16), 1).broadcast_to([TILE, 32])
        f3 = gl.expand_dims(fourth.to(gl.bfloat16), 1).broadcast_to([TILE, 32])
    return f0, f1, f2, f3


@gluon.jit
def _numbers(words, s0, s1, o0, o1, HALF: gl.constexpr, HAS_OFFSET: gl.constexpr):
    """Dequantize two quarters of a step."""
    if HAS_OFFSET:
        return gl.inline_asm_elementwise(
            _FIRST_OFFSET if HALF == 0 else _SECOND_OFFSET, _OFFSET_OPERANDS, (words, s0, s1, o0, o1),
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _FIRST if HALF == 0 else _SECOND, _OPERANDS, (words, s0, s1), dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def _hold(n0, n1):
    """Keep the registers of two operands alive, see _HOLD."""
    gl.inline_asm_elementwise(_HOLD, _HELD, (n0,), dtype=gl.int8, is_pure=False, pack=16)
    gl.inline_asm_elementwise(_HOLD, _HELD, (n1,), dtype=gl.int8, is_pure=False, pack=16)


@gluon.jit
def _add_half(acc, n0, n1, x, HALF: gl.constexpr):
    """Issue the wgmmas of half a step, and wait for those of the half before."""
    acc = warpgroup_mma(n0, x.slice(64 * HALF, 32, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(n1, x.slice(64 * HALF + 32, 32, dim=1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(2, [acc])


@gluon.jit
def _load_weight(
    stage, step, panel, pred, w_desc, s_desc, o_desc, w_ring, s_ring, o_ring, full,
    BYTES: gl.constexpr, PER_STEP: gl.constexpr, GROUP_STEPS: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """Start the TMA copies of one step's words, scales and offsets."""
    bar, group = full.index(stage), step * PER_STEP // GROUP_STEPS
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(w_desc, [0, panel, step * 64, 0], bar, w_ring.index(stage), pred=pred)
    tma.async_copy_global_to_shared(s_desc, [group, 0, panel * 64], bar, s_ring.index(stage), pred=pred)
    if HAS_OFFSET:
        tma.async_copy_global_to_shared(o_desc, [group, 0, panel * 64], bar, o_ring.index(stage), pred=pred)


@gluon.jit
def _advance(step, panel, row, total_steps, rows, PANELS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the next step: of the tile, of the next rows with the same weights, or of the next weights. Without
    divisions, which would take longer than the wgmmas of a step."""
    over = step + 1 == total_steps
    row = gl.where(over, row + BLOCK_M, row)
    whole = row >= rows
    return gl.where(over, 0, step + 1), gl.where(whole, panel + PANELS, panel), gl.where(whole, 0, row)


@gluon.jit
def produce(
    full, empty, x_ring, w_ring, s_ring, o_ring, x_desc, w_desc, s_desc, o_desc, M, total_steps, row_tiles, total,
    per_program, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PER_STEP: gl.constexpr, GROUP_STEPS: gl.constexpr,
    GATED: gl.constexpr, HAS_OFFSET: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Copy the steps of a program to the ring. The producer warp's code."""
    PANELS: gl.constexpr = 1 if GATED else 2
    BYTES: gl.constexpr = BLOCK_M * 256 + TILE * 64 + (2 if HAS_OFFSET else 1) * PER_STEP * TILE * 2
    begin = gl.program_id(0) * per_program
    count = gl.minimum(per_program, total - begin)
    tile = begin // total_steps
    first_step, first_panel, first_row = begin % total_steps, tile // row_tiles * PANELS, tile % row_tiles * BLOCK_M
    step, panel, row = first_step, first_panel, first_row
    for stage in gl.static_range(STAGES):
        _load_weight(
            stage, step, panel, stage < count, w_desc, s_desc, o_desc, w_ring, s_ring, o_ring, full, BYTES, PER_STEP,
            GROUP_STEPS, HAS_OFFSET,
        )  # fmt: skip
        step, panel, row = _advance(step, panel, row, total_steps, M, PANELS, BLOCK_M)
    if DEPENDENT:
        gdc_wait()
    step, panel, row = first_step, first_panel, first_row
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [row, step * 128], full.index(stage), x_ring.index(stage), pred=stage < count
        )
        step, panel, row = _advance(step, panel, row, total_steps, M, PANELS, BLOCK_M)
    at, phase = 0, 0
    for _ in range(STAGES, count):
        mbarrier.wait(empty.index(at), phase)
        _load_weight(
            at, step, panel, True, w_desc, s_desc, o_desc, w_ring, s_ring, o_ring, full, BYTES, PER_STEP, GROUP_STEPS,
            HAS_OFFSET,
        )  # fmt: skip
        tma.async_copy_global_to_shared(x_desc, [row, step * 128], full.index(at), x_ring.index(at))
        step, panel, row = _advance(step, panel, row, total_steps, M, PANELS, BLOCK_M)
        over = at + 1 == STAGES
        phase = gl.where(over, phase ^ 1, phase)
        at = gl.where(over, 0, at + 1)


@gluon.jit
def _slot(program, tile, total_steps, per_program):
    """Return the slot for a program's partial sums of a tile: its first tile or its last."""
    return program * 2 + (tile != program * per_program // total_steps).to(gl.int32)


@gluon.jit
def _join(
    acc, tile, program, total_steps, per_program, partial_ptr, counter_ptr, BLOCK_M: gl.constexpr,
    LEVELS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Reduce the partial sums of all programs of a tile, pairwise along a fixed binary tree. Returns the sums, and 1 if
    this program has the total. Of two programs that meet, the first to arrive stores its sums and stops."""
    SIZE: gl.constexpr = TILE * BLOCK_M
    first = tile * total_steps // per_program
    count = ((tile + 1) * total_steps - 1) // per_program - first + 1
    mine = program - first
    n = gl.arange(0, TILE, gl.SliceLayout(1, mma))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
    # The values of a warp's lanes are adjacent in memory.
    row = n // 8 % 2 * (4 * TILE) + n // 16 * 64 + n % 8 * 8
    place = row[:, None] + (m // 8 * (8 * TILE) + m % 8)[None, :]
    goes_on = 1
    for level in gl.static_range(LEVELS):
        left = mine // (2 << level) * (2 << level)
        right = left + (1 << level)
        if (right < count) & (goes_on == 1):
            counter = counter_ptr + _slot(first + right, tile, total_steps, per_program)
            own, other = right, left
            if mine < right:
                own, other = left, right
            met = gl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
            if met == 0:
                at = _slot(first + own, tile, total_steps, per_program)
                gl.store(partial_ptr + at * SIZE + place, acc)
                barrier()
                met = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            goes_on = met
            if met == 1:
                gl.store(counter, 0)
                at = _slot(first + other, tile, total_steps, per_program)
                acc += gl.load(partial_ptr + at * SIZE + place, cache_modifier=".cg")
    return acc, goes_on


@gluon.jit
def _finish(
    acc, tile, row_tiles, M, N, out_ptr, bias_ptr, residual_ptr, out_stride, residual_stride, BLOCK_M: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Epilogue: bias, gate and residual on sums [TILE, BLOCK_M], stored to out [M, N]."""
    OUT: gl.constexpr = TILE // 2 if GATED else TILE
    WIDE: gl.constexpr = OUT // 8  # lanes, each with eight adjacent outputs
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [WIDE, 32 // WIDE], [1, gl.num_warps()], [0, 1])
    if GATED:
        pairs: gl.constexpr = gl.BlockedLayout([8, 1, 2], [WIDE, 32 // WIDE, 1], [1, gl.num_warps(), 1], [2, 0, 1])
        both = gl.permute(gl.reshape(acc, [2, OUT, BLOCK_M]), [1, 2, 0])
        acc, up = gl.split(gl.convert_layout(both, pairs))
        acc = gl.convert_layout(acc, layout, assert_trivial=True)
        up = gl.convert_layout(up, layout, assert_trivial=True)
    else:
        acc = gl.convert_layout(acc, layout)
        up = acc
    n = tile // row_tiles * OUT + gl.arange(0, OUT, gl.SliceLayout(1, layout))
    m = tile % row_tiles * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    if HAS_BIAS:
        acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if GATED:
        acc = activate(acc, KIND) * up
    inside = (n < N)[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + m[None, :].to(gl.int64) * residual_stride + n[:, None]
        acc += gl.load(at, mask=inside, other=0.0).to(gl.float32)
    at = out_ptr + m[None, :].to(gl.int64) * out_stride + n[:, None]
    gl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def consume(
    full, empty, x_ring, w_ring, s_ring, o_ring, out_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr, M, N,
    total_steps, row_tiles, total, per_program, out_stride, residual_stride,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PER_STEP: gl.constexpr, FRAGMENTS: gl.constexpr,
    LEVELS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_OFFSET: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Multiply the steps of a program as they arrive in the ring, and store the tiles whose total this program has. The
    code of the consumer warpgroups."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    program = gl.program_id(0)
    begin = program * per_program
    end = gl.minimum(begin + per_program, total)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    i = begin
    for _ in gl.static_range(FRAGMENTS):  # unrolled: with nested loops ptxas would wait for each wgmma
        tile = i // total_steps
        stop = gl.minimum(end, (tile + 1) * total_steps)
        acc = gl.zeros([TILE, BLOCK_M], gl.float32, mma)
        b0 = gl.zeros([TILE, 32], gl.bfloat16, dot)
        b1 = b0
        for j in range(i, stop):
            done = j - begin
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            words, x = w_ring.index(stage).load(dot), x_ring.index(stage)
            s0, s1, s2, s3 = _factors(s_ring, stage, PER_STEP, dot)
            o0, o1, o2, o3 = s0, s1, s2, s3
            if HAS_OFFSET:
                o0, o1, o2, o3 = _factors(o_ring, stage, PER_STEP, dot)
            a0, a1 = _numbers(words, s0, s1, o0, o1, 0, HAS_OFFSET)
            acc = _add_half(acc, a0, a1, x, 0)
            _hold(b0, b1)
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), pred=done > 0)
            b0, b1 = _numbers(words, s2, s3, o2, o3, 1, HAS_OFFSET)
            acc = _add_half(acc, b0, b1, x, 1)
            _hold(a0, a1)
        acc = warpgroup_mma_wait(0, [acc])
        _hold(b0, b1)
        if i < stop:
            acc, has_all = _join(
                acc, tile, program, total_steps, per_program, partial_ptr, counter_ptr, BLOCK_M, LEVELS, mma
            )
            if has_all == 1:
                _finish(
                    acc, tile, row_tiles, M, N, out_ptr, bias_ptr, residual_ptr, out_stride, residual_stride, BLOCK_M,
                    GATED, KIND, HAS_BIAS, HAS_RESIDUAL,
                )  # fmt: skip
        i = stop
