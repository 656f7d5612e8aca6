"""Times the products of a layer's experts in bfloat16: python -m benchmarks.gpu.experts --shapes gpt-oss-20b

Gate and up with the gate, and down, each in a captured graph: by the Triton kernel, and by the kernel for Hopper GPUs
with several tiles. Prints microseconds per layer. "library": dense gemms of all rows, as if there was one expert.
"floor": the time of the gemms, or of reading the weights of the experts that the tokens use, at the rates that
`benchmarks.gpu` assumes, whichever is longer.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.floor import BANDWIDTH, BF16_RATE
from benchmarks.gpu.kernel_timing import relative_error
from quire.kernels.clamp import Clamp
from quire.kernels.cuda.grouped_product import GroupedTile, hopper_grouped_product
from quire.kernels.triton.gauge import graph_us
from quire.kernels.triton.grouped import GroupedTiling, Routing, Stack, choose_grouped_tilings, grouped_product, route

CUDA = torch.device("cuda", 0)
TOKENS = (1, 8, 64, 192, 512, 1024, 2048, 8192)
TILES = ("32,2", "64,1", "64,2", "96,2", "128,2", "192,2")
_MANY_TOKENS = 512  # from which one dense gemm is timed beside them
_WRONG = 0.01  # relative difference between the kernels


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

    def routing(self, logits: Tensor, tile: GroupedTile | GroupedTiling) -> Routing:
        return route(logits, self._shape.used, tile, is_normalized=True)

    def triton(self, x: Tensor, logits: Tensor) -> tuple[partial[Tensor], partial[Tensor]]:
        """Return the products of gate and up, and of down, by the Triton kernel."""
        shape, pairs = self._shape, len(x) * self._shape.used
        first, second = choose_grouped_tilings(pairs, shape.num, x.element_size(), CUDA)
        routing = self.routing(logits, first)
        options = {"num_used": shape.used, "activation": "silu", "clamp": shape.clamp}
        up = partial(grouped_product, x, self._gate_up, routing, first, **options)  # type: ignore[arg-type]
        return up, partial(grouped_product, up(), self._down, routing, second, num_used=1)

    def hopper(self, x: Tensor, logits: Tensor, tile: GroupedTile) -> tuple[partial[Tensor], partial[Tensor]]:
        """Return the same by the kernel for Hopper GPUs."""
        shape, routing = self._shape, self.routing(logits, tile)
        options = {"num_used": shape.used, "activation": "silu", "clamp": shape.clamp}
        up = partial(hopper_grouped_product, x, self._gate_up, routing, tile, **options)  # type: ignore[arg-type]
        return up, partial(hopper_grouped_product, up(), self._down, routing, tile, num_used=1)

    def library(self, tokens: int) -> list[float]:
        """Return the microseconds of two dense gemms of as many rows as there are pairs, without gate or bias."""
        times, pairs = [], tokens * self._shape.used
        for stack in (self._gate_up, self._down):
            weight = stack.numbers[0]
            x = torch.randn(pairs, weight.shape[1], device=CUDA).bfloat16()
            times.append(graph_us([partial(torch.mm, x, weight.t())]))
        return times

    def floors(self, tokens: int, experts: int) -> tuple[float, float]:
        """Return the least microseconds of both products, where `experts` experts are used."""
        shape = self._shape
        numbers = shape.hidden * shape.size
        down = 1e6 * max(experts * numbers * 2 / BANDWIDTH, tokens * shape.used * numbers * 2 / BF16_RATE)
        return 2 * down, down


def measure(name: str, shape: Shape, tokens_of: list[int], given: list[GroupedTile]) -> None:
    layer = Layer(shape)
    for tokens in tokens_of:
        tiles = sensible(given, tokens * shape.used / shape.num)
        x = torch.randn(tokens, shape.hidden, device=CUDA).bfloat16()
        logits = torch.randn(tokens, shape.num, device=CUDA)
        calls = layer.triton(x, logits)
        wanted = [call() for call in calls]
        used = len(set(layer.routing(logits, GroupedTile(16)).chosen.flatten().tolist()))
        floors, times = layer.floors(tokens, used), [graph_us([call]) for call in calls]
        head = f"{name} {tokens:5d} tokens, floor {floors[0]:7.1f} + {floors[1]:7.1f}"
        print(f"{head}  {'triton':>12} {times[0]:7.1f} + {times[1]:7.1f} = {sum(times):7.1f}", flush=True)
        if tokens >= _MANY_TOKENS:
            dense = layer.library(tokens)
            print(
                f"{'':{len(head)}}  {'library':>12} {dense[0]:7.1f} + {dense[1]:7.1f} = {sum(dense):7.1f} (one expert)"
            )
        for tile in tiles:
            own = layer.hopper(x, logits, tile)
            error = relative_error(own[1](), wanted[1])
            taken = [graph_us([call]) for call in own]
            word = f"{tile.block_m} x {tile.width}"
            ratio = f"{sum(times) / sum(taken):.2f}x"
            wrong = "" if error < _WRONG else f"  WRONG: {error:.1e}"
            print(
                f"{'':{len(head)}}  {word:>12} {taken[0]:7.1f} + {taken[1]:7.1f} = {sum(taken):7.1f} {ratio}{wrong}",
                flush=True,
            )


def sensible(tiles: list[GroupedTile], rows: float) -> list[GroupedTile]:
    """Return the tiles that suit experts with `rows` rows on average."""
    return [tile for tile in tiles if rows / 3 <= tile.block_m <= max(64, 8 * rows) or tile.block_m >= 128 <= rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument(
        "--tiles", nargs="+", default=TILES, help="pairs, and units of 128 rows of a weight",
    )  # fmt: skip
    options = parser.parse_args()
    tiles = [GroupedTile(*map(int, each.split(","))) for each in options.tiles]
    for name in options.shapes:
        measure(name, SHAPES[name], options.tokens, tiles)


if __name__ == "__main__":
    main()
