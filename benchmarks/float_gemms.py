"""Compares float32 gemms on a CPU with torch.mm, which is MKL's or oneDNN's: python -m benchmarks.float_gemms
    [--shapes smollm2,1.5b] [--rows 1,8,64,512] [--threads 2] [--repeats 9] [--clock wall] [--json PATH]

Every distinct gemm of a layer runs with weights in Quire's panels and with torch.mm on the plain weight, interleaved.
Prints medians of GFLOP/s, and the median of the ratios. Both results are compared first. On a machine with other work,
use `--clock cpu --threads 1` to measure CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import facts, publish, save
from benchmarks.weight_bandwidth import SHAPES, Shape
from quire.kernels.native.loader import set_threads
from quire.kernels.native.ops import multiply
from quire.kernels.native.panels import cut_panels

FLOATS_OF_A_TURN = 2e8  # multiply-adds per measurement at least, so that the clock's resolution does not matter
LARGEST_ERROR = 1e-3  # of a result, relative to the norm of its row, because sums are rounded in another order


def measure(weight: Tensor, rows: int, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return GFLOP/s of Quire and of torch in each turn. Raises ArithmeticError if their results differ."""
    outputs, inputs = weight.shape
    x, panels, across = torch.randn(rows, inputs), cut_panels(weight), weight.t()
    work: dict[str, Callable[[], Tensor]] = {
        "quire": lambda: multiply(x, panels),
        "torch": lambda: torch.mm(x, across),
    }
    error = (work["quire"]() - work["torch"]()).abs().max().item() / inputs**0.5
    if not error < LARGEST_ERROR:
        raise ArithmeticError(f"{rows} rows times a weight of {outputs} x {inputs}: results differ by {error}")
    times = max(1, round(FLOATS_OF_A_TURN / (rows * outputs * inputs)))
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, each in work.items():
            begin = clock()
            for _ in range(times):
                each()
            found[name].append(2e-9 * times * rows * outputs * inputs / (clock() - begin))
    return found


def gemms_of_layer(shape: Shape) -> list[tuple[int, int]]:
    """Return the (outputs, inputs) of each distinct gemm of a layer."""
    return list(dict.fromkeys(shape.gemms()[:-1]))


def main() -> None:
    options = _parse()
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    where, rows, data = facts(), [], {}
    for name in options.shapes.split(","):
        for outputs, inputs in gemms_of_layer(SHAPES[name]):
            weight = torch.randn(outputs, inputs)
            for count in map(int, options.rows.split(",")):
                found = data[f"{name} {outputs}x{inputs} {count}"] = measure(weight, count, options.repeats, clock)
                ratio = median(own / peer for own, peer in zip(found["quire"], found["torch"], strict=True))
                speeds = [f"{median(found[each]):.1f}" for each in ("quire", "torch")]
                rows.append([f"{name}, {outputs} x {inputs}", count, *speeds, f"{ratio:.2f}x"])
    unit = "of CPU time" if options.clock == "cpu" else "of wall time"
    title = f"gemms of float32 rows, {options.threads} threads, seconds {unit}, {options.repeats} turns"
    publish(title, ["weight", "rows", "quire GFLOP/s", "torch GFLOP/s", "ratio"], rows, where)
    save(options.json, title, where, data)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2,1.5b", help=f"with commas, of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,64,512", help="rows of a gemm, with commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
