"""Times gemms of a few rows with 4-bit weights, by tile configuration: python -m benchmarks.gpu.nibbles

For each gemm of an 8B model's layer it prints the floor given by its bytes, the time of each tile configuration inside
a CUDA graph over cold weights, and the error against plain torch. Then it times a chain of layers as in a step, without
attention, and extrapolates to a step of 32 layers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from quire.kernels.norm import Norm
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import Layer
from quire.kernels.triton.gemm_w4 import PackedW4, gemm_w4, pack_w4, unpack_w4
from quire.kernels.triton.gemv_w4 import GemvTiling, gemv_w4
from quire.kernels.triton.measurement import graph_us
from quire.kernels.triton.measurement_cases import Sizes

CUDA = torch.device("cuda")
LAYERS = Sizes().layers()[:-1]
KINDS = {"symmetric, groups of 128": (128, False), "offsets, groups of 64": (64, True)}
TILINGS = [
    GemvTiling(steps, warps) for steps, warps in ((4, 1), (2, 2), (8, 2), (4, 4), (8, 4), (16, 4), (16, 8), (16, 16))
]
COLD_BYTES = 160 << 20
MODEL_LAYERS = 32


class Case(NamedTuple):
    layer: Layer
    kind: str
    rows: int
    tiling: GemvTiling | None  # None: `gemm_w4`


def all_cases(rows_of: list[int]) -> Iterator[Case]:
    for kind in KINDS:
        for layer in LAYERS:
            for rows in rows_of:
                if rows > 1:
                    yield Case(layer, kind, rows, None)
                for tiling in TILINGS:
                    yield Case(layer, kind, rows, tiling)


def make_weight(layer: Layer, kind: str, seed: int) -> PackedW4:
    group, has_offset = KINDS[kind]
    generator = torch.Generator(CUDA).manual_seed(seed)
    shape = (layer.weight_rows, layer.inputs)
    levels = torch.randint(0, 16, shape, device=CUDA, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape[0], shape[1] // group, device=CUDA, generator=generator) * 0.01).half()
    return pack_w4(levels, scales, scales * 0.5 if has_offset else None)


def weight_bytes(weight: PackedW4) -> int:
    return weight.data.nbytes + weight.scales.nbytes * (1 if weight.offsets is None else 2)


class Operands:
    """The operands of one layer's gemms."""

    def __init__(self, layer: Layer, kind: str, rows: int, cold: bool = True) -> None:
        self.layer, self.rows = layer, rows
        first = make_weight(layer, kind, 0)
        count = -(-COLD_BYTES // weight_bytes(first)) if cold else 1
        self.weights = [first] + [make_weight(layer, kind, seed) for seed in range(1, count)]
        self.x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
        self.norm = Norm((torch.rand(layer.inputs, device=CUDA) + 0.5).bfloat16(), 1e-5)
        self.residual = torch.randn(rows, layer.outputs, device=CUDA).bfloat16()
        self.out = torch.empty_like(self.residual)

    def call(self, weight: PackedW4, case: Case, workspace: Workspace, dependent: bool = False) -> Tensor:
        norm = self.norm if self.layer.norm and self.rows == 1 else None
        residual = self.residual if self.layer.residual else None
        if case.tiling is None:
            return gemm_w4(
                self.x, weight, workspace, residual=residual, activation=self.layer.activation, out=self.out,
                dependent=dependent,
            )  # fmt: skip
        return gemv_w4(
            self.x, weight, self.out, residual=residual, activation=self.layer.activation, norm=norm,
            tiling=case.tiling, dependent=dependent,
        )  # fmt: skip

    def error(self, case: Case, workspace: Workspace) -> float:
        x = self.x.float()
        if self.layer.norm and self.rows == 1:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * self.norm.weight.float()
        wanted = x @ unpack_w4(self.weights[0]).t()
        if self.layer.activation is not None:
            gate, up = wanted.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
        if self.layer.residual:
            wanted = wanted + self.residual.float()
        self.out.fill_(float("nan"))
        return relative_error(self.call(self.weights[0], case, workspace, True), wanted)


def measure_gemms(rows_of: list[int], workspace: Workspace) -> dict[tuple[str, str, int], GemvTiling]:
    """Return the best tile configuration of each layer, kind and number of rows."""
    best: dict[tuple[str, str, int], tuple[float, GemvTiling]] = {}
    operands, found = None, ""
    for case in all_cases(rows_of):
        name = f"{case.layer.name:9s} {case.kind} M={case.rows}"
        if name != found:
            operands, found = None, name
            operands = Operands(case.layer, case.kind, case.rows)
            size = weight_bytes(operands.weights[0])
            print(f"{name}: {size / 1e6:.1f} MB, {size / READ_CEILING * 1e6:.2f} us at {READ_CEILING / 1e12} TB/s")
        assert operands is not None
        try:
            error = operands.error(case, workspace)
            us = graph_us([partial(operands.call, each, case, workspace, True) for each in operands.weights])
        except Exception as failure:  # noqa: BLE001  one case must not hide the others
            print(f"  {case.tiling}: FAILED {type(failure).__name__} {str(failure)[:200]}", flush=True)
            continue
        label = "gemm_w4"
        if case.tiling is not None:
            label = "S{} W{}".format(*case.tiling)
        wrong = "" if error < 0.02 else "  WRONG"
        share = 100 * weight_bytes(operands.weights[0]) / us * 1e6 / READ_CEILING
        print(f"  {label:16s} {us:7.2f} us  {share:5.1f} %  err {error:.1e}{wrong}", flush=True)
        key = (case.layer.name, case.kind, case.rows)
        if case.tiling is not None and not wrong and us < best.get(key, (1e9, None))[0]:
            best[key] = us, case.tiling
    return {key: tiling for key, (_, tiling) in best.items()}


def report_chain(kind: str, rows: int, cases: dict[str, Case], workspace: Workspace) -> None:
    """Print the microseconds of one layer in a chain, launched one after the other and with programmatic dependent
    launch."""
    layers = [[Operands(layer, kind, rows, cold=False) for layer in LAYERS] for _ in range(4)]
    size = sum(weight_bytes(each.weights[0]) for each in layers[0])

    def run(dependent: bool) -> None:
        for gemms in layers:
            for each in gemms:
                each.call(each.weights[0], cases[each.layer.name], workspace, dependent)

    plain, ahead = (graph_us([partial(run, dependent)]) / len(layers) for dependent in (False, True))
    tilings = ", ".join(f"{name}: {tuple(case.tiling or ())}" for name, case in cases.items())
    print(
        f"layer of {kind}, M={rows}, {tilings}: {plain:.1f} us in turn, {ahead:.1f} us as dependents, floor"
        f" {size / READ_CEILING * 1e6:.1f}; {MODEL_LAYERS} layers {ahead * MODEL_LAYERS / 1e3:.3f} ms",
        flush=True,
    )


def warm(part: str, rows_of: list[int], workspace: Workspace) -> None:
    index, count = map(int, part.split("/"))
    made: dict[tuple[str, str, int], Operands] = {}
    for case in list(all_cases(rows_of))[index::count]:
        key = (case.layer.name, case.kind, case.rows)
        made = made if key in made else {key: Operands(case.layer, case.kind, case.rows, cold=False)}
        made[key].call(made[key].weights[0], case, workspace, True)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    workspace = Workspace.make(CUDA)
    if options.warm:
        warm(options.warm, options.rows, workspace)
        return
    command = [sys.executable, "-m", "benchmarks.gpu.nibbles", *sys.argv[1:]]
    workers = [
        subprocess.Popen([*command, "--warm", f"{index}/{options.workers}"], stderr=subprocess.DEVNULL)
        for index in range(options.workers)
    ]
    for worker in workers:
        worker.wait()
    best = measure_gemms(options.rows, workspace)
    for kind in KINDS:
        for rows in options.rows:
            chosen = {layer.name: Case(layer, kind, rows, best.get((layer.name, kind, rows))) for layer in LAYERS}
            report_chain(kind, rows, chosen, workspace)
            if rows > 1:
                report_chain(kind, rows, {layer.name: Case(layer, kind, rows, None) for layer in LAYERS}, workspace)


if __name__ == "__main__":
    main()
