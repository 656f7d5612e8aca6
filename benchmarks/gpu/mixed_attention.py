"""Times attention of steps with decode rows and prompt chunks: python -m benchmarks.gpu.mixed_attention [--heads 0.6B]

For each mix, microseconds of a layer's attention inside a CUDA graph: decode rows alone, chunks alone, both one after
the other, and both on parallel branches. Both must give the same results, to the last bit; otherwise it exits 1.
The last column is the share of the shorter part that the branches hide.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.attention_cases import HEADS
from benchmarks.report import facts, publish
from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.measurement import graph_us
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.registry import make_backend
from quire.runtime.attention.triton import TritonAttention, TritonPlan
from quire.runtime.layers.weights import Placement

DEVICE = torch.device("cuda")
DIM, BLOCK = 128, 16
LAYER_BYTES = 1 << 30  # caches of several layers are read in turn, so that none stays in the L2 cache
Chunk = tuple[int, int]  # first position, tokens


@dataclass(frozen=True, slots=True)
class Mix:
    """Decode rows of one length, together with prompt chunks."""

    rows: int
    length: int
    chunks: tuple[Chunk, ...]

    @property
    def name(self) -> str:
        start, count = self.chunks[0]
        return f"{self.rows} x {self.length}, {len(self.chunks)} x {count} after {start}"


MIXES = tuple(
    Mix(rows, length, chunks)
    for rows, length in ((8, 512), (32, 1024), (64, 1024), (192, 800))
    for chunks in (((0, 128),), ((4096, 128),), ((0, 512),), ((6144, 512),), ((0, 2048),), ((0, 512),) * 8)
)


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds per layer."""

    decodes: float
    chunks: float
    serial: float
    branches: float

    @property
    def hidden(self) -> float:
        """The share of the shorter part that parallel branches save."""
        return (self.serial - self.branches) / max(min(self.decodes, self.chunks), 1e-9)


class Bench:
    """One mix in memory: caches of several layers, the queries of a step, and its plans."""

    def __init__(self, mix: Mix, heads: tuple[int, int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._heads, self._rule = Heads(*heads, DIM), AttentionRule(DIM**-0.5)
        sequences = [(mix.length - 1, 1)] * mix.rows + list(mix.chunks)
        needed = [-(-(start + count) // BLOCK) for start, count in sequences]
        blocks = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
        self._tables = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).to(DEVICE)
        shape = (sum(needed), heads[1], BLOCK, DIM)
        count = max(1, min(16, LAYER_BYTES // (4 * int(np.prod(shape)))))
        self._layers = [LayerCache.of(self._random(shape), self._random(shape)) for _ in range(count)]
        self.backend = self._make_backend(mix.rows)
        chunks = np.array([(0, start, count, mix.rows + i) for i, (start, count) in enumerate(mix.chunks)])
        chunks[:, 0] = mix.rows + np.cumsum(chunks[:, 2]) - chunks[:, 2]
        tokens = mix.rows + int(chunks[:, 2].sum())
        self._query = self._random((tokens, heads[0], DIM))
        rows = [*range(mix.rows), *np.repeat(chunks[:, 3], chunks[:, 2]).tolist()]
        positions = [mix.length - 1] * mix.rows
        positions += [start + i for start, count in mix.chunks for i in range(count)]
        self._given = (torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.tensor(positions, device=DEVICE))
        self._lengths = torch.full((mix.rows,), mix.length, device=DEVICE)
        self._tiles = self.backend.tiles(chunks).to(DEVICE)

    def _make_backend(self, rows: int) -> TritonAttention:
        backend = make_backend("triton", self._heads, torch.bfloat16, Placement(torch.bfloat16, DEVICE), BLOCK)
        assert isinstance(backend, TritonAttention)
        backend.accept(self._rule)
        backend.reserve(self._layers[:1], rows)
        return backend

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def plan(self, *, decodes: bool = True, chunks: bool = True) -> TritonPlan:
        """Return the plan of the step, or of a part of it."""
        lengths, tiles = self._lengths if decodes else self._lengths[:0], self._tiles if chunks else None
        return self.backend.plan(*self._given, lengths, self._tables, tiles)

    def found(self, plan: TritonPlan) -> Tensor:
        return self._attend(self._layers[-1], plan)

    def calls(self, plan: TritonPlan) -> Sequence[Callable[[], object]]:
        return [lambda layer=layer: self._attend(layer, plan) for layer in self._layers]

    def _attend(self, layer: LayerCache, plan: TritonPlan) -> Tensor:
        return self.backend.attend(self._query, self._query, self._query, layer, plan, self._rule)


def measure(mix: Mix, heads: tuple[int, int]) -> tuple[Times, float]:
    """Return the times of a mix, and the largest difference between both ways of running it."""
    bench = Bench(mix, heads)
    assert bench.backend._side is not None
    bench.backend._most_branched = 1 << 30  # every mix is timed with and without branches
    apart = [graph_us(bench.calls(bench.plan(decodes=part, chunks=not part))) for part in (True, False)]
    plan = bench.plan()
    together, beside = bench.found(plan), graph_us(bench.calls(plan))
    bench.backend._side = None
    in_turn, serial = bench.found(plan), graph_us(bench.calls(plan))
    difference = (together.float() - in_turn.float()).abs().max().item()
    return Times(*apart, serial, beside), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", choices=HEADS, default="8B")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    lines, rows, wrong = [], [], []
    for mix in MIXES:
        times, difference = measure(mix, HEADS[options.heads])
        wrong += [] if difference == 0.0 else [f"{mix.name}: {difference:.1e}"]
        rows.append({"mix": mix.name, "difference": difference, **asdict(times)})
        numbers = (times.decodes, times.chunks, times.serial, times.branches)
        gain = times.serial / times.branches
        lines.append(
            (mix.name, *(f"{number:.1f}" for number in numbers), f"{gain:.2f}x", f"{100 * times.hidden:.0f} %")
        )
    header = ("decode rows, chunks", "decodes, us", "chunks, us", "serial, us", "branches, us", "gain", "hidden")
    publish(f"Attention of mixed steps, heads of {options.heads}", header, lines, facts())
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if wrong:
        sys.exit(f"branches found other numbers: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
