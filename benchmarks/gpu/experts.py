"""Times the gemms of a layer's experts in bfloat16: python -m benchmarks.gpu.experts --shapes gpt-oss-20b

Gate and up with the gate, and down, each in a captured graph, in microseconds per layer. "dense": gemms of all rows, as
if there was one expert. "floor": the time of the gemms, or of reading the weights of the experts that the tokens use,
at the rates that `benchmarks.gpu` assumes, whichever is longer.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.floor import BANDWIDTH, BF16_RATE
from quire.kernels.clamp import Clamp
from quire.kernels.triton.grouped import Stack, choose_grouped_tilings, grouped_gemm, route
from quire.kernels.triton.measurement import graph_us

CUDA = torch.device("cuda", 0)
TOKENS = (1, 8, 64, 192, 512, 1024, 2048, 8192)
_MANY_TOKENS = 512  # from which dense gemms are timed beside them


class Shape(NamedTuple):
    """The experts of a model's layer."""

    num: int
    used: int
    hidden: int
    size: int
    clamp: Clamp | None = None
    has_bias: bool = False


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, Clamp(7.0, 1.702, 1.0), has_bias=True),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
}


class Layer:
    """A layer's experts, with random weights."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._gate_up, self._down = self._stack(2 * shape.size, shape.hidden), self._stack(shape.hidden, shape.size)

    def _stack(self, rows: int, inputs: int) -> Stack:
        num = self._shape.num
        weight = torch.empty(num, rows, inputs, dtype=torch.bfloat16, device=CUDA).normal_(0.0, inputs**-0.5)
        bias = torch.randn(num, rows, device=CUDA).bfloat16() if self._shape.has_bias else None
        return Stack(weight, None, bias)

    def grouped(self, tokens: int) -> tuple[list[float], tuple[float, float]]:
        """Return the microseconds of gate and up, and of down, for tokens that choose at random, and their floors."""
        shape, pairs = self._shape, tokens * self._shape.used
        x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
        first, second = choose_grouped_tilings(pairs, shape.num, x.element_size(), CUDA)
        routing = route(torch.randn(tokens, shape.num, device=CUDA), shape.used, first, is_normalized=True)
        options = {"num_used": shape.used, "activation": "silu", "clamp": shape.clamp}
        up = partial(grouped_gemm, x, self._gate_up, routing, first, **options)  # type: ignore[arg-type]
        down = partial(grouped_gemm, up(), self._down, routing, second, num_used=1)
        used = len(set(routing.chosen.flatten().tolist()))
        return [graph_us([up]), graph_us([down])], self._floors(pairs, used)

    def dense(self, tokens: int) -> list[float]:
        """Return the microseconds of two dense gemms of as many rows as there are pairs, without gate or bias."""
        times, pairs = [], tokens * self._shape.used
        for stack in (self._gate_up, self._down):
            weight: Tensor = stack.numbers[0]
            x = torch.randn(pairs, weight.shape[1], device=CUDA).bfloat16()
            times.append(graph_us([partial(torch.mm, x, weight.t())]))
        return times

    def _floors(self, pairs: int, experts: int) -> tuple[float, float]:
        """Return the least microseconds of both gemms, where `experts` experts are used."""
        numbers = self._shape.hidden * self._shape.size
        down = 1e6 * max(experts * numbers * 2 / BANDWIDTH, pairs * numbers * 2 / BF16_RATE)
        return 2 * down, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens of a step")
    options = parser.parse_args()
    for name in options.shapes:
        layer = Layer(SHAPES[name])
        for tokens in options.tokens:
            times, floors = layer.grouped(tokens)
            parts = [f"{name} {tokens:5d} tokens", _sum("experts", times), _sum("floor", list(floors))]
            if tokens >= _MANY_TOKENS:
                parts.append(_sum("dense", layer.dense(tokens)))
            print("; ".join(parts), flush=True)


def _sum(what: str, times: list[float]) -> str:
    return f"{what} {' + '.join(f'{each:.1f}' for each in times)} = {sum(times):.1f} us"


if __name__ == "__main__":
    main()
