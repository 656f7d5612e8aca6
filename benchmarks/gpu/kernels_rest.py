"""Checks and times every kernel but attention on a GPU: python -m benchmarks.gpu.kernels_rest --json PATH [--tune]

Prints a line per case: error against plain torch, time inside a CUDA graph, bandwidth, and percent of the peak read
bandwidth. Kernels are first compiled by several processes at once into Triton's disk cache. With --tune, it searches
tile sizes of the gemms instead, in a workspace like the engine's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import rest_gemms, rest_layers, rest_levels, rest_small
from benchmarks.gpu.kernel_timing import Case, measure
from quire.kernels.triton.gemm_skinny import Workspace

LARGEST_ERROR = 0.02  # of bf16 results; float8 outputs and activations are within LARGEST_FLOAT8_ERROR
LARGEST_FLOAT8_ERROR = 0.05


def main() -> None:
    options = _options()
    begin = time.perf_counter()
    workspace = Workspace.make(torch.device("cuda"))
    if options.warm:
        _warm(options, workspace)
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if not options.tune:
        _compile_ahead(options)
    print(f"# compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if options.tune:
        found["tuned"] = _tune(options, workspace)
    else:
        found |= _measure(options, workspace, begin)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(f"# {time.perf_counter() - begin:.0f} s in all")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="of the gemms to tune")
    parser.add_argument("--kinds", nargs="+", default=["bf16"], choices=["bf16", "w8", "w8a8"], help="to tune")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=110.0, help="no case starts later")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    return parser.parse_args()


def _makers(workspace: Workspace) -> list[Callable[[], Case]]:
    return [*rest_small.cases(), *rest_gemms.cases(workspace), *rest_levels.cases(workspace)]


def _compile_ahead(options: argparse.Namespace) -> None:
    """Let other processes run every kernel once. A failure shows up again when the kernel is measured."""
    command = [sys.executable, "-m", "benchmarks.gpu.kernels_rest", *sys.argv[1:]]
    workers = [
        subprocess.Popen([*command, "--warm", f"{index}/{options.workers}"], stderr=subprocess.DEVNULL)
        for index in range(options.workers)
    ]
    for worker in workers:
        worker.wait()


def _warm(options: argparse.Namespace, workspace: Workspace) -> None:
    index, count = map(int, options.warm.split("/"))
    for maker in _makers(workspace)[index::count]:
        case = maker()
        if options.only in case.name:
            case.calls[0]()
            torch.cuda.synchronize()
    for _, make in rest_layers.chains(workspace)[index::count]:
        chain = make()
        chain.run(False)
        chain.run(True)
        torch.cuda.synchronize()


def _measure(options: argparse.Namespace, workspace: Workspace, begin: float) -> dict[str, Any]:
    results, wrong, late = [], [], 0
    for maker in _makers(workspace):
        if time.perf_counter() - begin > options.seconds:
            late += 1
            continue
        case = maker()
        if options.only not in case.name:
            continue
        try:
            result = measure(case)
        except Exception as error:  # noqa: BLE001  one case must not hide the others
            print(f"{case.name:44s} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
            wrong.append(case.name)
            continue
        bound = LARGEST_FLOAT8_ERROR if "float8" in case.name else LARGEST_ERROR
        if not result.error <= bound:
            wrong.append(case.name)
        results.append(asdict(result))
        print(result.line() + ("" if result.error <= bound else "  WRONG"), flush=True)
    layers = _measure_layers(options, workspace, begin, wrong)
    print(f"# wrong or failed: {wrong or 'none'}; not started for lack of time: {late}")
    return {"cases": results, "layers": layers, "wrong": wrong, "late": late}


def _measure_layers(
    options: argparse.Namespace, workspace: Workspace, begin: float, wrong: list[str]
) -> list[dict[str, object]]:
    found = []
    for name, make in rest_layers.chains(workspace):
        if options.only or time.perf_counter() - begin > options.seconds:
            continue
        layer = rest_layers.measure_chain(name, make)
        found.append(layer)
        if not layer["same"]:
            wrong.append(str(layer["name"]))
        print(
            f"{layer['name']:44s} {layer['us']:9.2f} us  dependent {layer['dependent_us']:9.2f} us"
            f"  floor {layer['floor_us']:7.2f} us  {'same bits' if layer['same'] else 'DIFFERENT BITS'}",
            flush=True,
        )
    return found


def _tune(options: argparse.Namespace, workspace: Workspace) -> list[dict[str, object]]:
    """Print the best tile sizes as entries of `gemm_skinny_plan.MEASURED`."""
    found: list[dict[str, object]] = []
    for trial in rest_gemms.tune(workspace, tuple(options.rows), tuple(options.kinds)):
        key = trial.layer.shape(trial.rows, trial.kind)
        found.append({"key": key, **trial._asdict(), "layer": trial.layer.name})
        print(
            f"{key}: {trial.best},  # {trial.layer.name} M={trial.rows} {trial.kind}: {trial.best_us:.2f} us, before"
            f" {trial.present_us:.2f} us, library {trial.library_us or math.nan:.2f} us",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
