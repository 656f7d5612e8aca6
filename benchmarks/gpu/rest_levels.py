"""Products by 4- and 8-bit weights in groups, of one model's layers: cases to time, and a search over tilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import Case, relative_error
from benchmarks.gpu.rest_products import CUDA
from quire.kernels.triton.gauge import graph_us
from quire.kernels.triton.gauge_cases import Sizes
from quire.kernels.triton.level_products import (
    PackedLevels,
    Tiling,
    choose_level_tiling,
    level_product,
    pack_levels,
    tiling_key,
)
from quire.kernels.triton.product_trials import Layer
from quire.kernels.triton.products import Workspace

KINDS = ("w4", "w4 with zeros", "w8", "float8 blocks")
GROUP = 128
ROWS = (1, 16, 64, 256, 2048)
_CACHE_BYTES = 128 << 20  # more than the device's cache: weights come from memory
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_TILES = {
    16: ((64, 4, 4), (64, 4, 6), (128, 4, 4), (32, 4, 4)),
    128: ((64, 4, 3), (128, 8, 3), (128, 8, 4), (64, 8, 4)),
}


class LevelTrial(NamedTuple):
    key: tuple[int, int, int, int, bool]
    name: str
    best: Tiling
    best_us: float
    present_us: float


def cases(workspace: Workspace) -> Iterator[Callable[[], Case]]:
    for layer in Sizes().layers()[:-1]:
        for rows in ROWS:
            for kind in KINDS if rows <= 64 else ("w4",):
                yield partial(_case, layer, rows, kind, workspace)


def tune(workspace: Workspace, rows_of: tuple[int, ...]) -> Iterator[LevelTrial]:
    """The fastest tiling of 4-bit products of each layer, as entries of `level_products.MEASURED`."""
    for layer in Sizes().layers()[:-1]:
        weights = [_weight(layer, "w4", seed) for seed in range(_count(layer, "w4"))]
        for rows in rows_of:
            x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
            present = choose_level_tiling(rows, layer.outputs, layer.inputs, weights[0].data.shape[3],
                                          layer.activation is not None, CUDA)  # fmt: skip
            timed = {present: _time(layer, x, weights, workspace, present)}
            for block_n, warps, stages in _TILES[16 if rows <= 64 else 128]:
                for splits in _SPLITS if rows <= 256 else (1,):
                    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128)
                    tiling = Tiling(block_m, block_n, GROUP, splits, warps, stages)
                    if splits <= layer.inputs // GROUP // 2:
                        timed[tiling] = _time(layer, x, weights, workspace, tiling)
            best = min(timed, key=lambda tiling: timed[tiling])
            key = tiling_key(rows, layer.outputs, layer.inputs, weights[0].data.shape[3], layer.activation is not None)
            yield LevelTrial(key, f"{layer.name} M={rows}", best, timed[best], timed[present])


def _time(layer: Layer, x: Tensor, weights: list[PackedLevels], workspace: Workspace, tiling: Tiling) -> float:
    """Infinite where it does not fit."""
    calls = [partial(level_product, x, each, workspace, activation=layer.activation, tiling=tiling) for each in weights]
    try:
        return graph_us(calls)
    except Exception:  # noqa: BLE001  too much shared memory, or no room in the workspace
        return float("inf")


def _case(layer: Layer, rows: int, kind: str, workspace: Workspace) -> Case:
    weights = [_weight(layer, kind, seed) for seed in range(_count(layer, kind))]
    x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
    out = torch.empty(rows, layer.outputs, dtype=torch.bfloat16, device=CUDA)
    make = partial(level_product, x, workspace=workspace, activation=layer.activation, out=out)
    plain = torch.randn(layer.weight_rows, layer.inputs, device=CUDA).bfloat16()

    def error() -> float:
        values = _values(weights[0])
        wanted = x.float() @ values.t()
        if layer.activation is not None:
            gate, up = wanted.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
        return relative_error(make(weight=weights[0]), wanted)

    size = weights[0].data.numel() + weights[0].scales.numel() * weights[0].scales.element_size()
    return Case(
        f"levels {layer.name} M={rows} {kind}", [partial(make, weight=each) for each in weights], error, size,
        [partial(torch.mm, x, plain.t())],
    )  # fmt: skip


def _count(layer: Layer, kind: str) -> int:
    size = layer.weight_rows * layer.inputs // (2 if kind.startswith("w4") else 1)
    return max(2, -(-_CACHE_BYTES // size))


def _weight(layer: Layer, kind: str, seed: int) -> PackedLevels:
    generator = torch.Generator(CUDA).manual_seed(seed)
    shape, groups = (layer.weight_rows, layer.inputs), layer.inputs // GROUP
    scales = torch.rand(layer.weight_rows, groups, device=CUDA, generator=generator) * 0.02
    if kind == "float8 blocks":
        numbers = torch.randn(shape, device=CUDA, generator=generator).to(torch.float8_e4m3fn)
        return pack_levels(numbers, scales, None, nibbles=False)
    if kind == "w8":
        levels = torch.randint(-127, 128, shape, device=CUDA, generator=generator, dtype=torch.int8)
        return pack_levels(levels, scales.half(), None, nibbles=False)
    levels = torch.randint(0, 16, shape, device=CUDA, generator=generator, dtype=torch.uint8)
    offsets = scales.half() * 3 if "zeros" in kind else None
    return pack_levels(levels, scales.half(), offsets, nibbles=True)


def _values(weight: PackedLevels) -> Tensor:
    """The numbers of a packed weight."""
    data = weight.data
    if weight.nibbles:
        levels = torch.cat((data & 15, data >> 4), dim=3).float() - 8
    else:
        levels = data.float()
    rows = levels.transpose(1, 2).reshape(-1, weight.inputs)[: weight.outputs]
    size = weight.inputs // weight.scales.shape[0]
    values = rows * weight.scales.t()[: weight.outputs].float().repeat_interleave(size, dim=1)
    if weight.offsets is not None:
        values += weight.offsets.t()[: weight.outputs].float().repeat_interleave(size, dim=1)
    return values
