"""Measures the weight bandwidth of decode steps on a CPU: python -m benchmarks.weight_bandwidth
    [--shapes 1.5b,3b] [--bits 4] [--rows 8] [--batch 1] [--threads 2] [--repeats 5] [--clock wall] [--json PATH]

Times the gemms of one step of `--batch` streams, with weights in the panels of a Q4_K file (`--bits 2`, 3, 8: Q2_K,
Q3_K, Q8_0) and activations rounded to 8 bits (with `--rows 16` to 16, as for `cpu_weights="integer16"`), and a plain
sum over the same memory, interleaved; prints medians. Panels are filled with one byte, because their content does not
change the time. Attention, norms and sampling are not included. On a machine with other work, use `--clock cpu
--threads 1` to measure CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import facts, publish, save
from quire.kernels.native.loader import set_threads
from quire.kernels.native.ops import INT8_OUTPUTS, Int8Format, PackedWeight, multiply, panel_bytes

FILL = 0x11  # as a float16 scale it is 6e-4, so that no result overflows a float
FORMATS = {
    2: Int8Format(2, has_offsets=True, by_halves=True, has_super_blocks=True),
    3: Int8Format(3, has_offsets=False, by_halves=True, has_super_blocks=True),
    4: Int8Format(4, has_offsets=True, by_halves=False),
    8: Int8Format(8, has_offsets=False, by_halves=False),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model whose output head is as large as its embedding."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int  # outputs of the key and the value projection, each
    vocabulary: int

    def gemms(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every gemm of a step, in order."""
        layer = [
            (self.hidden + 2 * self.key_value, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]
        return [*layer * self.layers, (self.vocabulary, self.hidden)]


SHAPES = {  # of SmolLM2 and Qwen2.5; tiny: for testing the benchmark itself
    "tiny": Shape(layers=2, hidden=256, intermediate=512, key_value=32, vocabulary=512),
    "smollm2": Shape(layers=30, hidden=576, intermediate=1_536, key_value=192, vocabulary=49_152),
    "1.5b": Shape(layers=28, hidden=1_536, intermediate=8_960, key_value=256, vocabulary=151_936),
    "3b": Shape(layers=36, hidden=2_048, intermediate=11_008, key_value=256, vocabulary=151_936),
}


def make_weights(shape: Shape, bits: int, row_bits: int) -> list[PackedWeight]:
    form, weights = replace(FORMATS[bits], byte_rows=row_bits == 8), []
    for outputs, inputs in shape.gemms():
        size = -(-outputs // INT8_OUTPUTS) * panel_bytes(form, inputs)
        data = torch.full((size,), FILL, dtype=torch.uint8)
        weights.append(PackedWeight(torch.float32, form.number, outputs, inputs, data))
    return weights


def run_step(weights: list[PackedWeight], rows: dict[int, Tensor]) -> None:
    for weight in weights:
        multiply(rows[weight.inputs], weight)


def read_all(weights: list[PackedWeight]) -> None:
    for weight in weights:
        weight.data[: weight.data.numel() // 4 * 4].view(torch.float32).sum()


def measure(
    weights: list[PackedWeight], batch: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return bytes per second of the gemms and of the plain sum, interleaved."""
    rows = {inputs: torch.randn(batch, inputs) for inputs in {weight.inputs for weight in weights}}
    size = sum(weight.data.numel() for weight in weights)
    work = {"gemms": lambda: run_step(weights, rows), "read": lambda: read_all(weights)}
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, each in work.items():
            begin = clock()
            each()
            found[name].append(size / (clock() - begin))
    return found


def main() -> None:
    options = _parse()
    set_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    where, rows, data = facts(), [], {}
    for name in options.shapes.split(","):
        weights = make_weights(SHAPES[name], options.bits, options.rows)
        data[name] = measure(weights, options.batch, options.repeats, clock)
        size = sum(weight.data.numel() for weight in weights)
        gemms, read = (median(data[name][each]) for each in ("gemms", "read"))
        rows.append([name, f"{size / 1e9:.2f}", f"{size / gemms * 1e3:.0f}", f"{gemms / 1e9:.1f}",
                     f"{read / 1e9:.1f}", f"{gemms / read:.0%}"])  # fmt: skip
    unit = "of CPU time" if options.clock == "cpu" else "of wall time"
    bits = f"weights of {options.bits} bits, rows of {options.rows}"
    title = f"gemms of a decode step, {options.batch} streams, {bits}, {options.threads} threads, seconds {unit}"
    publish(title, ["shape", "GB", "ms a step", "gemms GB/s", "plain read GB/s", "of it"], rows, where)
    save(options.json, title, where, data)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1.5b,3b", help=f"with commas, of {', '.join(SHAPES)}")
    parser.add_argument("--bits", type=int, choices=sorted(FORMATS), default=4)
    parser.add_argument("--rows", type=int, choices=(8, 16), default=8, help="bits that rows are rounded to")
    parser.add_argument("--batch", type=int, default=1, help="streams of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
