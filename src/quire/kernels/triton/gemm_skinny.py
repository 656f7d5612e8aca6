"""Skinny gemm: few rows (decode steps of up to 256) times a weight, bound by reading the weight once.

One row is a gemv without tensor cores, a few weight rows per program. More rows use tensor cores with the weight as the
left operand (swap_ab: weight rows fill the tile, not the few tokens), and with split-K if the weight has too few rows
to occupy the GPU. The last program of a tile adds the splits in the order of K, so the result never depends on timing.
Rows that do not fit in one tile are cut, and the programs that need the same weights are launched adjacent to each
other, so that all but one find them in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.norm import Norm
from quire.kernels.triton.activation import ACTIVATIONS, activate
from quire.kernels.triton.gemm_skinny_plan import MOST_ROWS, PARTIAL_SUMS, TILE_COUNTERS, Tiling, choose_tiling
from quire.kernels.triton.int8 import as_float
from quire.kernels.triton.launch import FLOAT8, INTERPRETED, SMALL, await_inputs, check, check_rows

FAST_ROWS = 64


class Workspace(NamedTuple):
    """Scratch memory for split-K. Gemms that may run at the same time must not share one."""

    partials: Tensor  # float32
    counters: Tensor  # [tiles] int32: zero between gemms

    @classmethod
    def make(cls, device: torch.device, numbers: int = PARTIAL_SUMS, tiles: int = TILE_COUNTERS) -> Workspace:
        counters = torch.zeros(tiles, dtype=torch.int32, device=device)
        return cls(torch.empty(numbers, dtype=torch.float32, device=device), counters)


@triton.jit
def epilogue(
    acc, acc_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, out_stride, residual_stride,
    GATED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr,
):  # fmt: skip
    """Epilogue: apply scales, bias, gate and residual to float32 sums [n, m], and store to out [M, N]."""
    real = n < N
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
        acc *= x_scale
        acc_up *= x_scale
    if HAS_W_SCALE:
        acc *= tl.load(w_scale_ptr + n, mask=real, other=0.0)[:, None]
        if GATED:
            acc_up *= tl.load(w_scale_ptr + N + n, mask=real, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, KIND) * acc_up
    inside = real[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + m[None, :].to(tl.int64) * residual_stride + n[:, None]
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(w_ptr, w_row, begin, K, w_stride, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first cache lines of a tile's weight rows to L2, none past K. Weights are never written by an
    earlier kernel."""
    line = tl.minimum(begin + tl.arange(0, LINES) * (128 // BYTES), K - 1)
    at = (w_ptr + w_row[:, None] * w_stride + line[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sum_tiles(
    x_at, w_at, up_at, k, K, count,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr = tl.float32,
):  # fmt: skip
    """Return sums [BLOCK_N, BLOCK_M] over `count` steps of K, and those of the up weights or zeros. SUMS: dtype of the
    accumulators, int32 for int8 rows."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), SUMS)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), SUMS)
    for step in range(count):
        shift = step * BLOCK_K
        if EVEN_K:
            x, w = tl.load(x_at + shift), tl.load(w_at + shift)
        else:
            inside = k + shift < K
            x = tl.load(x_at + shift, mask=inside[:, None], other=0.0)
            w = tl.load(w_at + shift, mask=inside[None, :], other=0.0)
        acc = tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION, max_num_imprecise_acc=EXACT, out_dtype=SUMS)
        if GATED:
            if EVEN_K:
                up = tl.load(up_at + shift)
            else:
                up = tl.load(up_at + shift, mask=(k + shift < K)[None, :], other=0.0)
            acc_up = tl.dot(
                up.to(x.dtype), x, acc_up, input_precision=PRECISION, max_num_imprecise_acc=EXACT, out_dtype=SUMS
            )
    return acc.to(tl.float32), acc_up.to(tl.float32)


@triton.jit
def join_splits(
    acc, acc_up, tile, split, partial_ptr, counter_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Split-K reduction: return the sums of all splits of a tile, added in the order of K, and whether this program has
    them. The program that arrives last does."""
    last = True
    if SPLITS > 1:
        PARTS: tl.constexpr = 2 if GATED else 1
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partial_ptr + (tile * SPLITS + split) * (PARTS * SIZE) + place
        tl.store(mine, acc)
        if GATED:
            tl.store(mine + SIZE, acc_up)
        tl.debug_barrier()
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            tl.store(counter_ptr + tile, 0)
            acc, acc_up = tl.zeros_like(acc), tl.zeros_like(acc_up)
            first = partial_ptr + tile * SPLITS * (PARTS * SIZE) + place
            for other in range(SPLITS):
                acc += tl.load(first + other * (PARTS * SIZE), cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(first + other * (PARTS * SIZE) + SIZE, cache_modifier=".cg")
    return acc, acc_up, last


@triton.jit(do_not_specialize=["M", "steps"])
def _skinny_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, partial_ptr, counter_ptr,
    M, N, K, x_stride, w_stride, out_stride, residual_stride, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, W_BYTES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gemm with swapped operands: one program per (tile, split of K)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(M, BLOCK_M)
    m = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1).to(tl.int64)
    x_row = (m % M).to(tl.int64)  # unused rows of a tile load different rows of x: a single row loaded by all is slow
    begin = split * steps * BLOCK_K
    k = begin + tl.arange(0, BLOCK_K)
    w_at = w_ptr + w_row[:, None] * w_stride + k[None, :]
    up_at = w_ptr + (w_row + N)[:, None] * w_stride + k[None, :]
    if DEPENDENT:
        _prefetch(w_ptr, w_row, begin, K, w_stride, W_BYTES, 2 * BLOCK_K * W_BYTES // 128)
        if GATED:
            _prefetch(w_ptr, w_row + N, begin, K, w_stride, W_BYTES, 2 * BLOCK_K * W_BYTES // 128)
    await_inputs(DEPENDENT)
    count = tl.minimum(steps, tl.cdiv(K, BLOCK_K) - split * steps)
    x_at = x_ptr + x_row[None, :] * x_stride + k[:, None]
    acc, acc_up = sum_tiles(
        x_at, w_at, up_at, k, K, count, BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN_K, PRECISION, EXACT,
        tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32,
    )  # fmt: skip
    acc, acc_up, last = join_splits(
        acc, acc_up, tile, split, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLITS, GATED
    )  # fmt: skip
    if last:
        epilogue(
            acc, acc_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, out_stride,
            residual_stride, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, HAS_X_SCALE, HAS_W_SCALE,
        )  # fmt: skip


@triton.jit
def _load_k(at, k, K, EVEN_K: tl.constexpr, POLICY: tl.constexpr):
    if EVEN_K:
        return tl.load(at, eviction_policy=POLICY)
    return tl.load(at, mask=k < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def _sum_runs(x, RUN: tl.constexpr):
    """Sum RUN adjacent elements of each row: a thread holds them all, so no exchange is needed."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // RUN, RUN)), 2)


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, norm_ptr, N, K, w_stride, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_X_SCALE: tl.constexpr, HAS_W_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr, EVEN_K: tl.constexpr, W_BYTES: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    RUN: tl.constexpr = 8  # adjacent elements that a thread loads: 16 bytes of x
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1).to(tl.int64)
    if DEPENDENT:
        _prefetch(w_ptr, w_row, 0, K, w_stride, W_BYTES, BLOCK_K * W_BYTES // 128)
        if GATED:
            _prefetch(w_ptr, w_row + N, 0, K, w_stride, W_BYTES, BLOCK_K * W_BYTES // 128)
    await_inputs(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_K // RUN), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K // RUN), tl.float32)
    square = tl.zeros((1, BLOCK_K // RUN), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = tl.max_contiguous(start + tl.arange(0, BLOCK_K), RUN)[None, :]  # a float8 weight gets the layout of x
        w = _load_k(w_ptr + w_row[:, None] * w_stride + k, k, K, EVEN_K, "evict_first")
        x = _load_k(x_ptr + k, k, K, EVEN_K, "evict_last").to(tl.float32)
        if HAS_NORM:
            square += _sum_runs(x * x, RUN)
            x = x * _load_k(norm_ptr + k, k, K, EVEN_K, "evict_last").to(tl.float32)
        acc += _sum_runs(as_float(w, COMPILED) * x, RUN)
        if GATED:
            up = _load_k(w_ptr + (w_row[:, None] + N) * w_stride + k, k, K, EVEN_K, "evict_first")
            acc_up += _sum_runs(as_float(up, COMPILED) * x, RUN)
    total = tl.sum(acc, 1, keep_dims=True)  # [BLOCK_N, 1]
    total_up = tl.sum(acc_up, 1, keep_dims=True) if GATED else total
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(square) / K + eps)
        total *= inverse
        total_up *= inverse
    epilogue(
        total, total_up, tl.arange(0, 1), n, 1, N, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, 0, 0,
        GATED, KIND, HAS_BIAS, HAS_RESIDUAL, HAS_X_SCALE, HAS_W_SCALE,
    )  # fmt: skip


def skinny_gemm(
    x: Tensor,  # [M, K], at most MOST_ROWS rows: a float dtype, or float8 or int8 with x_scale
    weight: Tensor,  # [N, K], x's dtype or quantized with weight_scale; [2 * N, K], gate then up, with an activation
    workspace: Workspace,
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    x_scale: Tensor | None = None,  # [M] float32
    weight_scale: Tensor | None = None,  # [weight rows] float32
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    norm: Norm | None = None,  # fused RMS norm, only with M = 1
    out: Tensor | None = None,  # [M, N]; by default of x's dtype, of the residual's, or bfloat16
    tiling: Tiling | None = None,  # by default chosen for the shape
    dependent: bool = False,
) -> Tensor:
    """Return x @ weight.T with its epilogue, accumulated and finished in float32, rounded once. Float8 rows in tiles of
    more than FAST_ROWS accumulate in the tensor cores, which keep fewer bits than float32, as in cuBLAS.

    Deterministic: the same inputs always give the same bits. dependent: programmatic dependent launch; then the
    previous kernel must not write the weight, which is prefetched before that kernel ends.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    _check_gemm(x, weight, x_scale, weight_scale, norm)
    if out is None:
        like = x if residual is None else residual
        out = torch.empty(rows, outputs, dtype=torch.bfloat16 if like.dtype in SMALL else like.dtype, device=x.device)
    check_rows(out, "out")
    check(out.shape == (rows, outputs), "out is [M, N]")
    check(residual is None or (residual.shape == out.shape and residual.stride(1) == 1), "residual is [M, N]")
    if rows == 0:
        return out
    if tiling is None:
        sizes = x.element_size(), weight.element_size()
        tiling = choose_tiling(rows, outputs, inputs, *sizes, activation is not None, x.device)
    flags = {
        "GATED": activation is not None, "KIND": ACTIVATIONS[activation or "silu"], "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None, "HAS_X_SCALE": x_scale is not None,
        "HAS_W_SCALE": weight_scale is not None, "W_BYTES": weight.element_size(), "DEPENDENT": dependent,
        "num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": dependent,
    }  # fmt: skip
    operands = (x, weight, out, bias, residual, x_scale, weight_scale)
    if tiling.block_m == 1:
        _launch_vector(operands, norm, outputs, tiling, flags)
    else:
        check(norm is None, "a norm can be fused for one row only")
        _launch_tiles(operands, workspace, outputs, tiling, flags)
    return out


def _launch_vector(operands, norm: Norm | None, outputs: int, tiling: Tiling, flags) -> None:
    x, weight = operands[:2]
    check(x.shape[0] == 1, "a tiling of block_m 1 is for one row")
    _vector_kernel[(triton.cdiv(outputs, tiling.block_n),)](
        *operands, norm and norm.weight, outputs, x.shape[1], weight.stride(0), norm.eps if norm else 0.0,
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, HAS_NORM=norm is not None,
        EVEN_K=x.shape[1] % tiling.block_k == 0, STAGES=tiling.stages, COMPILED=not INTERPRETED,
        **flags,
    )  # fmt: skip


def _launch_tiles(operands, workspace: Workspace, outputs: int, tiling: Tiling, flags) -> None:
    x, weight, out, _, residual = operands[:5]
    rows, inputs = x.shape
    tiles = triton.cdiv(outputs, tiling.block_n) * triton.cdiv(rows, tiling.block_m)
    steps = triton.cdiv(inputs, tiling.block_k)
    needed = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if flags["GATED"] else 1)
    fits = tiling.splits == 1 or (needed <= workspace.partials.numel() and tiles <= workspace.counters.numel())
    check(fits, f"the workspace is too small: {needed} partial sums, {tiles} counters")
    _skinny_kernel[(tiles, tiling.splits)](
        *operands, workspace.partials, workspace.counters, rows, outputs, inputs,
        x.stride(0), weight.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        triton.cdiv(steps, tiling.splits),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, SPLITS=tiling.splits,
        EVEN_K=inputs % tiling.block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EXACT=_exact(x, tiling), **flags,
    )  # fmt: skip


def _exact(x: Tensor, tiling: Tiling) -> int | None:
    """Return after how many elements of K the tensor cores' sums are added to float32 accumulators; None: at the
    end."""
    if x.dtype != FLOAT8:
        return 0
    return tiling.block_k if tiling.block_m <= FAST_ROWS else None


def _check_gemm(
    x: Tensor, weight: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None, norm: Norm | None
) -> None:
    check_rows(x, "x")
    check_rows(weight, "weight")
    check(x.shape[0] <= MOST_ROWS, f"at most {MOST_ROWS} rows")
    check(x.shape[1] == weight.shape[1], "x and weight differ in K")
    check(weight.dtype in (x.dtype, *(SMALL if x_scale is None else ())), "the weight has x's dtype, or float8 or int8")
    check((x.dtype in SMALL) == (x_scale is not None), "a float8 or int8 x and x_scale come together")
    check((weight.dtype in SMALL) == (weight_scale is not None), "a float8 or int8 weight and its scale come together")
    check(norm is None or norm.weight.shape == (x.shape[1],), "the norm's weight has an element per column of x")
