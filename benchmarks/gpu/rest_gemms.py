"""Gemms of few rows for two models' layers: cases to time, and a search over tile configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.kernel_timing import Case
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import BYTES, Kind, Layer, Operands
from quire.kernels.triton.measurement import graph_us
from quire.kernels.triton.measurement_cases import Sizes
from quire.kernels.triton.tuning import Trial, run_trial

CUDA = torch.device("cuda")
MODELS = {"8b": Sizes(), "0.6b": Sizes(1024, 3072, 16, 8, 128, 151936)}
LAYERS = tuple(
    replace(layer, name=f"{name} {layer.name}") for name, sizes in MODELS.items() for layer in sizes.layers()
)


def kinds(rows: int) -> tuple[Kind, ...]:
    return ("bf16", "w8") if rows == 1 else ("bf16", "w8a8")


def cases(workspace: Workspace) -> Iterator[Callable[[], Case]]:
    """Yield functions that make cases: each allocates its memory only when called."""
    for layer in LAYERS:
        for rows in (1, 16, 64, 128, 256):
            for kind in kinds(rows):
                if layer.name.startswith("8b") if kind != "bf16" else rows <= 64:
                    yield partial(_case, layer, rows, kind, workspace)


def _case(layer: Layer, rows: int, kind: Kind, workspace: Workspace) -> Case:
    operands = Operands.make(layer, rows, kind, CUDA)
    size = layer.weight_rows * layer.inputs * BYTES[kind][1]
    return Case(
        f"gemm {layer.name} M={rows} {kind}", operands.calls(layer, workspace),
        partial(operands.error, layer, workspace), size, operands.library_calls(layer),
    )  # fmt: skip


def tune(workspace: Workspace, rows_of: tuple[int, ...], wanted: tuple[Kind, ...]) -> Iterator[Trial]:
    """Yield the fastest tile configuration of each layer, with the current one. Configurations that are wrong or do not
    fit are left out."""
    run = run_trial(CUDA, workspace, graph_us)
    for layer in LAYERS:
        for rows in rows_of:
            for kind in wanted:
                yield run(layer, rows, kind)
