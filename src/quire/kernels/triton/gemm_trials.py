"""Skinny gemms with all their operands, for trials of different tilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from quire.kernels.cuda.gated_gemm import gated_gemm, prefers_gated_gemm
from quire.kernels.library import FLOAT8_MULTIPLE, multiply_float8
from quire.kernels.norm import Norm
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.gemm_skinny_plan import Shape, Tiling, choose_tiling, fits_workspace, rows_held
from quire.kernels.triton.launch import num_processors
from quire.kernels.triton.measurement import num_copies
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.quantize import quantize_rows

Kind = Literal["bf16", "w8", "w8a8"]  # all two bytes; float8 weights; float8 activations too
BYTES: dict[Kind, tuple[int, int]] = {
    "bf16": (2, 2),
    "w8": (2, 1),
    "w8a8": (1, 1),
}  # bytes: of x, of the weight
_ONE_ROW = ((2, 2048, 1), (4, 1024, 1), (4, 2048, 1), (8, 1024, 1), (16, 1024, 1), (4, 1024, 4), (8, 1024, 3))
_ROWS = ((64, 256, 4), (64, 128, 6), (128, 128, 4), (128, 256, 3))  # outputs, bytes of a row of K per step, stages
_MOST_SPLITS = 16
# For more than 64 rows: rows, outputs, bytes of a row of K per step, warps, stages. The stages fill half a
# multiprocessor's shared memory if registers allow two programs on it, else all of it.
_SQUARE = ((128, 128, 128, 4, 3), (128, 128, 128, 8, 6))
_WIDE = {
    128: (*_SQUARE, (128, 64, 128, 4, 4), (128, 64, 256, 4, 2), (64, 128, 128, 4, 4)),
    256: (*_SQUARE, (256, 128, 128, 8, 4), (256, 64, 128, 8, 5), (128, 256, 128, 8, 4)),
}
_WIDE_GATED = {
    128: ((128, 64, 128, 4, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 4), (64, 64, 128, 4, 4)),
    256: ((256, 64, 128, 8, 4), (128, 64, 128, 4, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 4)),
}
_WIDE_SPLITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Layer:
    """The shape of a linear layer and what is fused into its gemm."""

    name: str
    outputs: int  # after the gate, if there is one
    inputs: int
    activation: str | None = None
    residual: bool = False
    norm: bool = False  # fused if there is one row

    @property
    def weight_rows(self) -> int:
        return self.outputs * (1 if self.activation is None else 2)

    def shape(self, rows: int, kind: Kind) -> Shape:
        return Shape(rows_held(rows), self.outputs, self.inputs, *BYTES[kind], self.activation is not None)


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one layer's gemm, with enough copies of the weight that none stays in the L2 cache."""

    x: Tensor
    x_scale: Tensor | None
    weights: list[tuple[Tensor, Tensor | None]]
    residual: Tensor | None
    norm: Norm | None
    out: Tensor

    @classmethod
    def make(cls, layer: Layer, rows: int, kind: Kind, device: torch.device) -> Operands:
        """Allocate random operands for a layer with `rows` rows."""
        x = torch.randn(rows, layer.inputs, device=device).bfloat16()
        norm = Norm(torch.rand(layer.inputs, device=device).bfloat16(), 1e-5) if layer.norm and rows == 1 else None
        weights: list[tuple[Tensor, Tensor | None]] = []
        for _ in range(num_copies(layer.weight_rows * layer.inputs * BYTES[kind][1])):
            weight = torch.empty(layer.weight_rows, layer.inputs, dtype=torch.bfloat16, device=device)
            weight.normal_(0.0, layer.inputs**-0.5)
            weights.append((weight, None) if kind == "bf16" else quantize_rows(weight))
        small, scale = quantize_rows(x) if kind == "w8a8" else (x, None)
        residual = torch.randn(rows, layer.outputs, device=device).bfloat16() if layer.residual else None
        out = torch.empty(rows, layer.outputs, dtype=torch.bfloat16, device=device)
        return cls(small, scale, weights, residual, norm, out)

    def call(
        self, layer: Layer, index: int, workspace: Workspace, tiling: Tiling | None = None, dependent: bool = False
    ) -> None:
        weight, weight_scale = self.weights[index]
        skinny_gemm(
            self.x, weight, workspace, residual=self.residual, x_scale=self.x_scale, weight_scale=weight_scale,
            activation=layer.activation, norm=self.norm, out=self.out, tiling=tiling, dependent=dependent,
        )  # fmt: skip

    def calls(self, layer: Layer, workspace: Workspace, tiling: Tiling | None = None) -> list[Callable[[], None]]:
        return [partial(self.call, layer, index, workspace, tiling) for index in range(len(self.weights))]

    def library_calls(self, layer: Layer) -> list[Callable[[], None]]:
        """Return calls that compute the same with what is used for many rows: cuBLAS with separate kernels for norm and
        gate, or the gated gemm kernel. Empty if there is no such gemm: float8 weights with other activations, sizes
        that float8 cuBLAS does not support, or float8 on a CPU."""
        if self.weights[0][1] is not None:
            even = layer.inputs % FLOAT8_MULTIPLE == layer.weight_rows % FLOAT8_MULTIPLE == 0
            if self.x_scale is None or not even or not self.x.is_cuda:
                return []
        return [partial(self._run_cublas, layer, index) for index in range(len(self.weights))]

    def error(self, layer: Layer, workspace: Workspace, tiling: Tiling | None = None) -> float:
        """Return the relative error (norm of the difference over the norm of the reference); infinite if a value is not
        finite."""
        self.out.fill_(float("nan"))
        self.call(layer, 0, workspace, tiling)
        weight, weight_scale = self.weights[0]
        wanted = gemm(
            self.x, weight, residual=self.residual, x_scale=self.x_scale, weight_scale=weight_scale,
            activation=layer.activation, norm=self.norm and (self.norm.weight, self.norm.eps),
        ).double()  # fmt: skip
        difference = (self.out.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        return float(difference) if bool(difference.isfinite()) else float("inf")

    def _run_cublas(self, layer: Layer, index: int) -> None:
        weight, weight_scale = self.weights[index]
        if self.x_scale is not None and weight_scale is not None:
            self._finish_float8(layer, multiply_float8(self.x, self.x_scale, weight, weight_scale))
            return
        transposed = weight.t()
        x = self.x if self.norm is None else rms_norm(self.x, *self.norm)
        if layer.activation is not None and prefers_gated_gemm(len(x), weight, None):
            gated_gemm(x, weight, layer.activation, self.out)
        elif layer.activation is not None:
            gate(torch.mm(x, transposed), layer.activation, self.out)
        elif self.residual is not None:
            self.residual.addmm_(x, transposed)
        else:
            torch.mm(x, transposed, out=self.out)

    def _finish_float8(self, layer: Layer, made: Tensor) -> None:
        """Apply the gate or residual that follows cuBLAS's float8 gemm; `made` is its result."""
        if layer.activation is not None:
            gate(made, layer.activation, self.out)
        elif self.residual is not None:
            self.residual.add_(made)


def candidates(layer: Layer, rows: int, kind: Kind, device: torch.device) -> list[Tiling]:
    """Return tilings worth a trial, the current choice first."""
    x_bytes, weight_bytes = BYTES[kind]
    gated = layer.activation is not None
    present = choose_tiling(rows, layer.outputs, layer.inputs, x_bytes, weight_bytes, gated, device)
    if rows == 1:
        return list(dict.fromkeys([present, *(Tiling(1, n, k, 1, 4, stages) for n, k, stages in _ONE_ROW)]))
    if rows > 64:
        return list(dict.fromkeys([present, *_wide_candidates(layer, rows, kind, num_processors(device))]))
    found, processors = [present], num_processors(device)
    for block_n, line, stages in _ROWS:
        if gated and block_n == 128:
            continue
        block_k = line // x_bytes
        steps, tiles = -(-layer.inputs // block_k), -(-layer.outputs // block_n)
        for programs in (processors, 2 * processors, 4 * processors):
            splits = max(1, min(_MOST_SPLITS, round(programs / tiles), steps // 2))
            splits = -(-steps // -(-steps // splits))
            found.append(Tiling(present.block_m, block_n, block_k, splits, 4, stages))
    return list(dict.fromkeys(found))


def _wide_candidates(layer: Layer, rows: int, kind: Kind, processors: int) -> Iterator[Tiling]:
    """Yield tilings with programs for at least half of the multiprocessors; with split-K, at most three per
    multiprocessor."""
    shape = layer.shape(rows, kind)
    for block_m, block_n, line, warps, stages in (_WIDE_GATED if shape.gated else _WIDE)[shape.rows]:
        block_k = line // shape.x_bytes
        tiles = -(-shape.outputs // block_n) * (shape.rows // block_m)
        steps = -(-shape.inputs // block_k)
        for splits in _WIDE_SPLITS:
            tiling = Tiling(block_m, block_n, block_k, -(-steps // -(-steps // splits)), warps, stages)
            enough, few = 2 * tiles * splits >= processors, splits == 1 or tiles * splits <= 3 * processors
            if enough and few and fits_workspace(shape, tiling):
                yield tiling
