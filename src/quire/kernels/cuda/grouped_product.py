"""Grouped gemm of a mixture of experts on Hopper GPUs: a warp-specialized kernel with a fused gate.

Takes the routing of `kernels/triton/grouped.py`, whose tiles of pairs it multiplies by 128 or 256 rows of a weight at a
time. Few pairs per expert are bound by reading the weights, which TMA copies ahead into a ring. See grouped_product.cu.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.cuda.gated_product import compile_pool, runs_on, wgmma_source
from quire.kernels.cuda.nvrtc import CudaKernel, TensorMap, compile_source
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.compiling import is_compiling_only
from quire.kernels.triton.grouped import Routing, Stack
from quire.kernels.triton.launch import check, check_rows, num_processors

_GROUPS = 2  # consumer warpgroups
_STEP, _EIGHT = 64, 8  # elements of K per stage; outputs and elements of K come in groups of this many
_LINE_BYTES = 2 * _STEP
_SHARED_BYTES = 226 << 10
_MOST_STAGES = 12
_ALIGNMENT = 1024  # of the ring, as the swizzle requires


class GroupedTile(NamedTuple):
    """The tile of one block: block_m pairs by 128 * height rows of an expert's weight."""

    block_m: int  # pairs: a multiple of eight
    height: int = 2  # in units of 64 rows of the weight, per warpgroup
    together: int = 8  # tiles of pairs that use the same weights one after the other

    @property
    def width(self) -> int:
        return 64 * _GROUPS * self.height

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.width) * _LINE_BYTES

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(_MOST_STAGES, _SHARED_BYTES // self.stage_bytes)


# Pairs per expert, on average, for which the kernel is faster than Triton's on an H200. Tiles wait for their weights
# more than for wgmma: one tile of 96 pairs ends before Triton's of 128, three of them before Triton's two or three.
_SHARES = ((44, 76), (240, 264))
_TILE = GroupedTile(96)


class _Kind(NamedTuple):
    """What a kernel is compiled for, besides its tile."""

    activation: str | None
    is_clamped: bool
    has_bias: bool
    dtype: torch.dtype


class _Product(ctypes.Structure):
    """Mirrors `Product` in grouped_product.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "bias", "out", "places", "tile_experts")),
        *((name, ctypes.c_int) for name in ("tiles", "columns", "rows", "outputs", "inputs", "steps")),
        *((name, ctypes.c_int) for name in ("x_stride", "used", "together")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "shift")),
    )


def takes_stack(stack: Stack) -> bool:
    """Whether the kernel supports these weights [experts, rows, inputs]: 16-bit, unscaled, on a Hopper GPU, with rows
    and inputs in multiples of 16 and eight."""
    weight, scale, bias = stack
    return (
        scale is None
        and (bias is None or bias.dtype == weight.dtype)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % (2 * _EIGHT) == weight.shape[2] % _EIGHT == weight.data_ptr() % 16 == 0
        and runs_on(weight.device)
    )


def choose_grouped_tile(pairs: int, num: int, gate_up: Stack, down: Stack) -> GroupedTile | None:
    """Choose the tile for `pairs` pairs of `num` experts; None if the Triton kernel is to multiply them, or must."""
    if not any(least * num <= pairs <= most * num for least, most in _SHARES):
        return None
    return _TILE if takes_stack(gate_up) and takes_stack(down) else None


def hopper_grouped_product(
    x: Tensor,  # [tokens, inputs], or [pairs, inputs] with num_used = 1
    stack: Stack,
    routing: Routing,  # with tiles of tile.block_m pairs
    tile: GroupedTile,
    *,
    num_used: int,  # pairs per row of x
    activation: str | None = None,  # of ACTIVATIONS: weights are gate, then up, and the result is activation(gate) * up
    clamp: Clamp | None = None,  # of the gated activation
    dependent: bool = False,  # programmatic dependent launch
) -> Tensor:  # [pairs, outputs]
    """Multiply each pair's row by the weight of its expert, accumulating in float32 and rounding once. Rows of padding
    pairs, and of experts outside `routing.own`, are not written. Deterministic. Inside `compiling_only` nothing is
    launched: the kernel is compiled in the background."""
    weight, _, bias = stack
    num, rows, inputs = weight.shape
    outputs, pairs, tiles = rows // (1 if activation is None else 2), routing.chosen.numel(), len(routing.tile_experts)
    check_rows(x, "x")
    check(takes_stack(stack), "weights are 16-bit, contiguous and aligned, on a Hopper GPU")
    check(num == len(routing.own), "a matrix of each of the routing's own experts")
    check(x.dtype == weight.dtype and x.shape == (pairs // num_used, inputs), "x is [pairs / num_used, inputs]")
    check(bias is None or (bias.shape == (num, rows) and bias.is_contiguous()), "bias: a number per output")
    check(x.stride(0) % _EIGHT == x.data_ptr() % 16 == 0, "rows begin at multiples of 16 bytes")
    check(outputs % _EIGHT == tile.block_m % _EIGHT == 0, "outputs and pairs of a tile come in eights")
    check(len(routing.places) == tiles * tile.block_m, "the routing has tiles of block_m pairs")
    check(clamp is None or activation is not None, "a clamp is of a gate")
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    compiled = _begin(tile, _Kind(activation, clamp is not None, bias is not None, x.dtype), x.device)
    if is_compiling_only():
        return out
    columns = -(-rows // tile.width)
    given = _Product(
        x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), routing.places.data_ptr(),
        routing.tile_experts.data_ptr(), tiles, columns, rows, outputs, inputs, -(-inputs // _STEP),
        x.stride(0) // _EIGHT, num_used, tile.together, *(clamp or Clamp(0.0)),
    )  # fmt: skip
    weights = _map_of_weights(weight.data_ptr(), x.dtype, (num, outputs, inputs), tile.width, activation is not None)
    programs = min(tiles * columns, num_processors(x.device))
    _load(compiled, tile, x.device).launch(programs, 128 * (_GROUPS + 1), (weights, given), dependent=dependent)
    return out


@cache
def _begin(tile: GroupedTile, kind: _Kind, device: torch.device) -> Future[bytes]:
    """Start to compile a kernel in the background. NVRTC does not hold the GIL."""
    is_half = kind.dtype == torch.float16
    constants = constants_of(tile, kind.activation, kind.is_clamped, kind.has_bias, is_half)
    capability = torch.cuda.get_device_capability(device)
    wgmma = wgmmas_of(tile, "f16" if is_half else "bf16")
    files = ("hopper.cuh", "grouped_product.cu")
    return compile_pool().submit(compile_source, files, constants, capability, before=wgmma)


def wgmmas_of(tile: GroupedTile, dtype: str) -> str:
    """Return the source of the wgmmas of a tile: for all of its pairs, and for some quarters of them."""
    quarter = tile.block_m // 4
    widths = range(quarter, tile.block_m + 1, quarter) if quarter % _EIGHT == 0 else (tile.block_m,)
    return "".join(wgmma_source(width, dtype) for width in widths)


def constants_of(
    tile: GroupedTile, activation: str | None, is_clamped: bool, has_bias: bool, is_half: bool
) -> dict[str, int]:
    """Return the compile-time constants of the kernel."""
    return {
        "GROUPS": _GROUPS, "HEIGHT": tile.height, "ROWS": tile.block_m, "STAGES": tile.stages,
        "GATED": int(activation is not None), "ACTIVATION": ACTIVATIONS[activation or "silu"],
        "CLAMPED": int(is_clamped), "HAS_BIAS": int(has_bias), "IS_HALF": int(is_half),
    }  # fmt: skip


@cache
def _load(compiled: Future[bytes], tile: GroupedTile, device: torch.device) -> CudaKernel:
    with torch.cuda.device(device):
        return CudaKernel(compiled.result(), "grouped_product", tile.stages * tile.stage_bytes + _ALIGNMENT)


@lru_cache(maxsize=4096)
def _map_of_weights(
    address: int, dtype: torch.dtype, shape: tuple[int, int, int], width: int, is_gated: bool
) -> TensorMap:
    return TensorMap.make(address, dtype, *boxes_of_weights(shape, width, is_gated))


def boxes_of_weights(
    shape: tuple[int, int, int], width: int, is_gated: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return sizes, strides and box of a TMA map that views the weights as [experts, groups of eight outputs, gate or
    up, eight, inputs]: boxes have eight rows of gate, eight of up, and so on. Rows past the last output are zeros."""
    experts, outputs, inputs = shape
    parts = 2 if is_gated else 1
    sizes = (inputs, _EIGHT, parts, outputs // _EIGHT, experts)
    strides = (inputs, outputs * inputs, _EIGHT * inputs, parts * outputs * inputs)
    return sizes, strides, (_STEP, _EIGHT, parts, width // (parts * _EIGHT), 1)
