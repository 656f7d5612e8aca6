"""Times a gated MLP of many rows, with a fused gate and without: python -m benchmarks.gpu.mlp --rows 96,256,8192

Runs norm, gate and up, gate, down and the residual add in a captured graph over several layers' weights, so that none
is in the cache. Both versions are interleaved; prints medians in microseconds per layer. "floor": the time of the
gemms, or of reading the weights, at the rates that `benchmarks.gpu` assumes, whichever is longer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch

from benchmarks.gpu.floor import BANDWIDTH, BF16_RATE
from quire.kernels.cuda.gated_gemm import choose_tile
from quire.kernels.norm import Norm
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import own_rows
from quire.kernels.triton.launch import num_processors
from quire.runtime.layers import skinny

CUDA = torch.device("cuda", 0)
SHAPES = {  # hidden and intermediate sizes
    "0.6B": (1024, 3072), "1.5B": (1536, 8960), "2B": (2048, 8192), "3B": (2048, 11008), "7B": (3584, 18944),
    "8B": (4096, 14336), "14B": (5120, 17408), "32B": (5120, 25600),
}  # fmt: skip
ROWS = "96,128,160,192,224,256,320,384,448,512,768,1024,2048,4096,8192"
_LAYER_BYTES = 600e6
_ROUNDS = 7


class Layer:
    def __init__(self, hidden: int, size: int, workspace: Workspace) -> None:
        def linear(outputs: int, inputs: int) -> skinny.TritonMultiply:
            weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=CUDA).normal_(0.0, inputs**-0.5)
            return skinny.TritonMultiply(weight, None, workspace, own_rows(outputs, inputs), 1)

        self._gate_up, self._down = linear(2 * size, hidden), linear(hidden, size)
        self._norm = Norm(torch.ones(hidden, dtype=torch.bfloat16, device=CUDA), 1e-5)

    def add_to(self, x: torch.Tensor) -> None:
        self._down.add_to(x, self._gate_up.gated(x, self._norm, "silu"))


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def in_turns(graphs: list[torch.cuda.CUDAGraph], x: torch.Tensor, replays: int) -> list[float]:
    """Return the median microseconds of a replay of each graph, interleaved."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, taken in zip(graphs, times, strict=True):
            x.normal_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1000 / replays)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--rows", default=ROWS)
    given = parser.parse_args()
    workspace = Workspace.make(CUDA)
    print(f"{'shape':>6} {'rows':>5} {'library':>9} {'own':>9} {'':>6} {'floor':>9}  tile")
    for name in given.shapes.split(","):
        hidden, size = SHAPES[name]
        weight_bytes = 6 * hidden * size
        layers = [Layer(hidden, size, workspace) for _ in range(max(2, min(8, int(_LAYER_BYTES / weight_bytes))))]
        for rows in map(int, given.rows.split(",")):
            x = torch.empty(rows, hidden, dtype=torch.bfloat16, device=CUDA).normal_()

            def step(x: torch.Tensor = x, layers: list[Layer] = layers) -> None:
                for layer in layers:
                    layer.add_to(x)

            with patch.object(skinny, "prefers_gated_gemm", return_value=False):
                library = captured(step)
            taken = in_turns([library, captured(step)], x, max(1, min(10, 4096 // rows)))
            by_library, own = (each / len(layers) for each in taken)
            floor = 1e6 * max(weight_bytes / BANDWIDTH, rows * weight_bytes / BF16_RATE)
            tile = choose_tile(rows, size, num_processors(CUDA))
            ratio = f"{by_library / own:.3f}x"
            print(
                f"{name:>6} {rows:5d} {by_library:9.1f} {own:9.1f} {ratio:>6} {floor:9.1f}  {tuple(tile)}", flush=True
            )


if __name__ == "__main__":
    main()
