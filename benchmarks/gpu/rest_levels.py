"""Gemms with 4- and 8-bit weights in groups, for one model's layers: cases to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import Case, relative_error
from benchmarks.gpu.rest_gemms import CUDA
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import Layer
from quire.kernels.triton.gemm_w4 import PackedW4, gemm_w4, pack_w4, unpack_w4
from quire.kernels.triton.gemm_w8 import PackedW8, gemm_w8, pack_w8
from quire.kernels.triton.measurement_cases import Sizes

KINDS = ("w4", "w4 with zeros", "w8", "float8 blocks")
GROUP = 128
ROWS = (1, 16, 64, 256, 2048)
_CACHE_BYTES = 128 << 20  # more than the device's cache, so that weights come from memory


def cases(workspace: Workspace) -> Iterator[Callable[[], Case]]:
    for layer in Sizes().layers()[:-1]:
        for rows in ROWS:
            for kind in KINDS if rows <= 64 else ("w4",):
                yield partial(_case, layer, rows, kind, workspace)


def _case(layer: Layer, rows: int, kind: str, workspace: Workspace) -> Case:
    weights = [_weight(layer, kind, seed) for seed in range(_count(layer, kind))]
    x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
    out = torch.empty(rows, layer.outputs, dtype=torch.bfloat16, device=CUDA)
    gemm = gemm_w4 if kind.startswith("w4") else gemm_w8
    make = partial(gemm, x, workspace=workspace, activation=layer.activation, out=out)
    plain = torch.randn(layer.weight_rows, layer.inputs, device=CUDA).bfloat16()

    def error() -> float:
        values = _values(weights[0])
        wanted = x.float() @ values.t()
        if layer.activation is not None:
            gate, up = wanted.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
        return relative_error(make(weight=weights[0]), wanted)

    size = weights[0].data.nbytes + weights[0].scales.numel() * weights[0].scales.element_size()
    return Case(
        f"levels {layer.name} M={rows} {kind}", [partial(make, weight=each) for each in weights], error, size,
        [partial(torch.mm, x, plain.t())],
    )  # fmt: skip


def _count(layer: Layer, kind: str) -> int:
    size = layer.weight_rows * layer.inputs // (2 if kind.startswith("w4") else 1)
    return max(2, -(-_CACHE_BYTES // size))


def _weight(layer: Layer, kind: str, seed: int) -> PackedW8 | PackedW4:
    generator = torch.Generator(CUDA).manual_seed(seed)
    shape, groups = (layer.weight_rows, layer.inputs), layer.inputs // GROUP
    scales = torch.rand(layer.weight_rows, groups, device=CUDA, generator=generator) * 0.02
    if kind == "float8 blocks":
        numbers = torch.randn(shape, device=CUDA, generator=generator).to(torch.float8_e4m3fn)
        return pack_w8(numbers, scales, None)
    if kind == "w8":
        levels = torch.randint(-127, 128, shape, device=CUDA, generator=generator, dtype=torch.int8)
        return pack_w8(levels, scales.half(), None)
    levels = torch.randint(0, 16, shape, device=CUDA, generator=generator, dtype=torch.uint8)
    offsets = scales.half() * 3 if "zeros" in kind else None
    return pack_w4(levels, scales.half(), offsets)


def _values(weight: PackedW8 | PackedW4) -> Tensor:
    """Return a packed weight dequantized."""
    if isinstance(weight, PackedW4):
        return unpack_w4(weight)
    rows = weight.data.float().transpose(1, 2).reshape(-1, weight.inputs)[: weight.outputs]
    size = weight.inputs // weight.scales.shape[0]
    values = rows * weight.scales.t()[: weight.outputs].float().repeat_interleave(size, dim=1)
    if weight.offsets is not None:
        values += weight.offsets.t()[: weight.outputs].float().repeat_interleave(size, dim=1)
    return values
