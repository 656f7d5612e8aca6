"""Skinny products of two models' layers: cases to time, and a search over tilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import Case, graph_us, num_copies, relative_error
from quire.kernels.reference.products import product
from quire.kernels.triton import products_plan as plan
from quire.kernels.triton.products import Norm, Workspace, skinny_product
from quire.kernels.triton.products_plan import Tiling, choose_tiling, rows_held
from quire.kernels.triton.quantize import quantize_rows

CUDA = torch.device("cuda")
BYTES = {"bf16": (2, 2), "w8": (2, 1), "w8a8": (1, 1)}  # of a number of x and of the weight


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    outputs: int
    inputs: int
    activation: str | None = None
    residual: bool = False
    norm: bool = False  # fused when there is one row

    @property
    def weight_rows(self) -> int:
        return self.outputs * (1 if self.activation is None else 2)


SHAPES = (
    Shape("8b qkv", 6144, 4096, norm=True),
    Shape("8b o", 4096, 4096, residual=True),
    Shape("8b gate_up", 14336, 4096, "silu", norm=True),
    Shape("8b down", 4096, 14336, residual=True),
    Shape("8b lm_head", 128256, 4096),
    Shape("0.6b qkv", 4096, 1024, norm=True),
    Shape("0.6b o", 1024, 2048, residual=True),
    Shape("0.6b gate_up", 3072, 1024, "silu", norm=True),
    Shape("0.6b down", 1024, 3072, residual=True),
    Shape("0.6b lm_head", 151936, 1024),
)


@dataclass(frozen=True, slots=True)
class Operands:
    x: Tensor
    x_scale: Tensor | None
    weights: list[tuple[Tensor, Tensor | None]]
    residual: Tensor | None
    norm: Norm | None
    out: Tensor

    @classmethod
    def make(cls, shape: Shape, rows: int, kind: str) -> Operands:
        """kind: "bf16", "w8" (float8 weights) or "w8a8" (float8 activations too)."""
        x = torch.randn(rows, shape.inputs, device=CUDA).bfloat16()
        norm = Norm(torch.rand(shape.inputs, device=CUDA).bfloat16(), 1e-5) if shape.norm and rows == 1 else None
        size = shape.weight_rows * shape.inputs * (2 if kind == "bf16" else 1)
        weights: list[tuple[Tensor, Tensor | None]] = []
        for _ in range(num_copies(size)):
            weight = torch.empty(shape.weight_rows, shape.inputs, dtype=torch.bfloat16, device=CUDA)
            weight.normal_(0.0, shape.inputs**-0.5)
            weights.append((weight, None) if kind == "bf16" else quantize_rows(weight))
        small, scale = quantize_rows(x) if kind == "w8a8" else (x, None)
        residual = torch.randn(rows, shape.outputs, device=CUDA).bfloat16() if shape.residual else None
        out = torch.empty(rows, shape.outputs, dtype=torch.bfloat16, device=CUDA)
        return cls(small, scale, weights, residual, norm, out)

    def call(self, shape: Shape, index: int, workspace: Workspace, tiling: Tiling | None, dependent: bool) -> None:
        weight, weight_scale = self.weights[index]
        skinny_product(
            self.x, weight, workspace, residual=self.residual, x_scale=self.x_scale, weight_scale=weight_scale,
            activation=shape.activation, norm=self.norm, out=self.out, tiling=tiling, dependent=dependent,
        )  # fmt: skip

    def calls(
        self, shape: Shape, workspace: Workspace, tiling: Tiling | None = None, dependent: bool = False
    ) -> list[Callable[[], None]]:
        indices = range(len(self.weights))
        return [partial(self.call, shape, index, workspace, tiling, dependent) for index in indices]

    def error(self, shape: Shape, workspace: Workspace, tiling: Tiling | None = None) -> float:
        self.out.fill_(float("nan"))
        self.call(shape, 0, workspace, tiling, False)
        weight, weight_scale = self.weights[0]
        wanted = product(
            self.x, weight, residual=self.residual, x_scale=self.x_scale, weight_scale=weight_scale,
            activation=shape.activation, norm=self.norm and (self.norm.weight, self.norm.eps),
        )  # fmt: skip
        return relative_error(self.out, wanted)


def kinds(rows: int) -> tuple[str, ...]:
    return ("bf16", "w8") if rows == 1 else ("bf16", "w8a8")


def cases(workspace: Workspace) -> Iterator[Callable[[], Case]]:
    """Makers of cases: each takes its memory only when called."""
    for shape in SHAPES:
        for rows in (1, 16, 64):
            for kind in kinds(rows):
                if kind == "bf16" or shape.name.startswith("8b"):
                    yield partial(_case, shape, rows, kind, workspace)


def _case(shape: Shape, rows: int, kind: str, workspace: Workspace) -> Case:
    operands = Operands.make(shape, rows, kind)
    size = shape.weight_rows * shape.inputs * (2 if kind == "bf16" else 1)
    baseline = []
    if kind == "bf16":
        baseline = [partial(torch.mm, operands.x, weight.t()) for weight, _ in operands.weights]
    return Case(
        f"product {shape.name} M={rows} {kind}", operands.calls(shape, workspace),
        partial(operands.error, shape, workspace), size, baseline,
    )  # fmt: skip


def candidates(rows: int, shape: Shape, kind: str) -> list[Tiling]:
    x_bytes, weight_bytes = BYTES[kind]
    gated = shape.activation is not None
    default = choose_tiling(rows, shape.outputs, shape.inputs, x_bytes, weight_bytes, gated, CUDA)
    if rows == 1:
        blocks = ((2, 2048, 1), (4, 1024, 1), (4, 2048, 1), (8, 1024, 1), (16, 1024, 1), (4, 1024, 4), (8, 1024, 3))
        return [default, *(Tiling(1, n, k, 1, 4, stages) for n, k, stages in blocks)]
    found = [default]
    for block_n, line, stages in ((64, 256, 4), (64, 128, 6), (128, 128, 4), (128, 256, 3)):
        if gated and block_n == 128:
            continue
        block_k = line // x_bytes
        steps, tiles = -(-shape.inputs // block_k), -(-shape.outputs // block_n)
        for programs in (132, 264, 528):
            splits = max(1, min(16, round(programs / tiles), steps // 2))
            splits = -(-steps // -(-steps // splits))
            found.append(Tiling(default.block_m, block_n, block_k, splits, 4, stages))
    return list(dict.fromkeys(found))


def tune(workspace: Workspace, rows_of: tuple[int, ...], wanted: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """The fastest tiling of each shape beside the default one. Tilings that are wrong or do not fit are left out."""
    for shape in SHAPES:
        for rows in rows_of:
            for kind in wanted:
                operands = Operands.make(shape, rows, kind)
                tilings = candidates(rows, shape, kind)
                times = {tiling: _time(operands, shape, workspace, tiling) for tiling in tilings}
                best = min(times, key=lambda tiling: times[tiling])
                sizes, gated = BYTES[kind], shape.activation is not None
                library = [partial(torch.mm, operands.x, weight.t()) for weight, _ in operands.weights]
                yield {
                    "library_us": graph_us(library) if kind == "bf16" else None,
                    "name": f"{shape.name} M={rows} {kind}",
                    "key": plan.Shape(rows_held(rows), shape.outputs, shape.inputs, *sizes, gated),
                    "default": tilings[0], "best": best, "default_us": times[tilings[0]], "best_us": times[best],
                }  # fmt: skip


def _time(operands: Operands, shape: Shape, workspace: Workspace, tiling: Tiling) -> float:
    try:
        if operands.error(shape, workspace, tiling) > 0.05:
            return float("inf")
        return graph_us(operands.calls(shape, workspace, tiling))
    except Exception as error:  # noqa: BLE001  shared memory or registers beyond the chip's
        print(f"# {shape.name} {tiling}: {error}")
        return float("inf")
