"""Times both forms of prompt attention over latents (DeepSeek): python -m benchmarks.gpu.latent_attention [--heads 16]

For each chunk, microseconds of a layer's attention inside a CUDA graph, with all gemms by the matrix that expands
latents: in the absorbed form and in the expanded one, which of the two a step takes, and what the prediction says of
both. The last columns are rates in TFLOP/s: of the absorbed attention and its gemms, of expanding and of attention
over expanded keys. Both forms must agree; otherwise it exits 1. --tune times further tile sizes of the expanded form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import facts, publish
from quire.config.attention_memory import SCRATCH_BYTES
from quire.config.model import Heads, Latent
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton import measurement
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_expanded import expand_latents, expanded_prefill
from quire.kernels.triton.attention_latent_prefill import latent_prefill
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.expanded import ExpandedScratch
from quire.runtime.attention.triton_latent import LatentTritonAttention
from quire.runtime.layers.head_linear import TritonHeads

DEVICE, DTYPE, BLOCK = torch.device("cuda"), torch.bfloat16, 16
LATENT = Latent(rank=512, nope_dim=128, rope_dim=64, value_dim=128)
DEPENDENT, DEPENDENT_ROWS = True, 2  # programmatic dependent launch, as in a step
LAYERS = 4  # whose caches and weights are read in turn, so that little stays in the L2 cache
CHUNKS = (  # first position, tokens, how many
    (0, 128, 16), (0, 512, 4), (0, 2048, 1), (2048, 128, 16), (2048, 256, 1), (6144, 512, 1), (6144, 2048, 1),
    (8192, 64, 1), (8192, 128, 1), (8192, 256, 1),
)  # fmt: skip
TRIALS = (
    PrefillConfig(128, 64, 8, 2), PrefillConfig(128, 128, 8, 2), PrefillConfig(64, 64, 4, 2),
    PrefillConfig(128, 32, 8, 4),
)  # fmt: skip


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Return microseconds per call, by fewer calls than short kernels need."""
    with patch.object(measurement, "_CALLS", len(calls)), patch.object(measurement, "_REPLAYS", 5):
        return measurement.graph_us(calls)


class Times(NamedTuple):
    """Microseconds per layer."""

    gemms: float
    absorbed: float  # attention alone
    expand: float
    attend: float
    forms: tuple[float, float]  # absorbed and expanded, whole


class Bench:
    """Chunks of one size in memory: latents, weights and queries of several layers, and the plans of both forms."""

    def __init__(self, chunk: tuple[int, int, int], num_heads: int) -> None:
        torch.manual_seed(0)
        start, count, number = chunk
        length, self.tokens = start + count, count * number
        self._heads, self.rule = num_heads, AttentionRule(LATENT.query_dim**-0.5)
        heads = Heads(num_heads, 1, LATENT.rank + LATENT.rope_dim, LATENT.rank)
        each = -(-length // BLOCK)
        self._tables = torch.randperm(each * number, dtype=torch.int32).view(number, each).to(DEVICE)
        memory = [self._random(each * number, 1, BLOCK, heads.dim) for _ in range(LAYERS)]
        self._caches = [LayerCache.of_latents(each, LATENT.rank) for each in memory]
        scale = LATENT.rank**-0.5
        keys = [self._random(num_heads, LATENT.rank, LATENT.nope_dim) * scale for _ in range(LAYERS)]
        values = [self._random(num_heads, LATENT.value_dim, LATENT.rank) * scale for _ in range(LAYERS)]
        self._weights = [
            (
                TritonHeads(key, LATENT.rope_dim, dependent_rows=DEPENDENT_ROWS),
                TritonHeads(value, 0, dependent_rows=DEPENDENT_ROWS),
            )
            for key, value in zip(keys, values, strict=True)
        ]
        self._query = self._random(self.tokens, num_heads * LATENT.query_dim)
        backend = LatentTritonAttention(heads, DTYPE, DEVICE, dependent_rows=DEPENDENT_ROWS)
        backend.accept_latent(LATENT, DTYPE)
        token_bytes = 2 * (num_heads * (LATENT.nope_dim + LATENT.value_dim) + 4 * LATENT.rope_dim)
        backend.reserve(self._caches[:1], 8, SCRATCH_BYTES // token_bytes)
        assert backend._expanded is not None
        self.scratch, self._backend = backend._expanded, backend
        self.spans = np.array([(i * count, start, count, i) for i in range(number)])
        self.takes = self.scratch.passes(self.spans, backend._prefill)
        self.passes = next((n for n in (1, 2, 3, 4) if self._pages(length) * number <= self.scratch._pages_in(n)), 0)
        rows, positions = self.spans[:, 3].repeat(count), np.concatenate([np.arange(start, length)] * number)
        self._given = (torch.from_numpy(rows).int().to(DEVICE), torch.from_numpy(positions).to(DEVICE))

    def _pages(self, length: int) -> int:
        return -(-length // 128)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    @property
    def predicted(self) -> tuple[float, float]:
        absorbed = self.scratch.absorbed_seconds(self.spans, self._backend._prefill)
        return 1e6 * absorbed, 1e6 * self.scratch.seconds(self.spans, max(1, self.passes))

    def _plan(self, passes: int) -> object:
        tiles = self._backend.tiles(self.spans, scratch=passes).to(DEVICE)
        none = torch.empty(0, dtype=torch.int64, device=DEVICE)
        return self._backend.plan(*self._given, none, self._tables, tiles, scratch=passes)

    def forms(self) -> tuple[list[Callable[[], Tensor]], list[Callable[[], Tensor]]]:
        """Return the calls of the absorbed and of the expanded form, one for each layer."""
        absorbed, expanded = (self._plan(passes) for passes in (0, self.passes))
        each = list(zip(self._caches, self._weights, strict=True))
        return (
            [partial(self._absorbed, cache, weights, absorbed) for cache, weights in each],
            [partial(self._expanded, cache, weights, expanded) for cache, weights in each],
        )

    def _absorbed(self, cache: LayerCache, weights: tuple[TritonHeads, TritonHeads], plan: object) -> Tensor:
        query = weights[0](self._query).view(self.tokens, self._heads, -1)
        return weights[1](self._backend.attend(query, query, query, cache, plan, self.rule))  # type: ignore[arg-type]

    def _expanded(self, cache: LayerCache, weights: tuple[TritonHeads, TritonHeads], plan: object) -> Tensor:
        out = torch.empty(self.tokens, self._heads * LATENT.value_dim, dtype=DTYPE, device=DEVICE)
        query = self._query.view(self.tokens, self._heads, -1)
        step = plan.expanded  # type: ignore[attr-defined]
        self.scratch.attend(query, cache, self._tables, step, self.rule, weights, out, dependent=DEPENDENT)
        return out

    def parts(self) -> tuple[float, float, float, float]:
        """Time the absorbed form's gemms and attention, and the expanded form's expansion and attention."""
        query = self._weights[0][0](self._query).view(self.tokens, self._heads, -1)
        latents, plan = query.new_empty(self.tokens, self._heads, LATENT.rank), self._plan(0)
        prefill = plan.prefill  # type: ignore[attr-defined]
        absorbed = timed([
            partial(
                latent_prefill, query, cache.key, self._tables, prefill, self.rule, out=latents, dependent=DEPENDENT
            )
            for cache in self._caches
        ])  # fmt: skip
        gemms = timed([
            partial(lambda to, back: (to(self._query), back(latents.flatten(1))), *weights)
            for weights in self._weights
        ])  # fmt: skip
        expand, attend = (timed(self.passes_of(which, self.scratch)) for which in (True, False))
        return gemms, absorbed, expand, attend

    def passes_of(self, expands: bool, scratch: ExpandedScratch) -> list[Callable[[], None]]:
        """Return calls, one for each layer, that run all passes of one of the two kernels of the expanded form."""
        lists = scratch.lists(self.spans, self.passes).to(DEVICE)
        step = scratch.plan(lists, self.passes, torch.empty(0, device=DEVICE)).plan
        query = self._query.view(self.tokens, self._heads, -1)
        out = torch.empty(self.tokens, self._heads * LATENT.value_dim, dtype=DTYPE, device=DEVICE)
        at_once = scratch._heads_in(self.passes)

        def run(cache: LayerCache, weights: tuple[TritonHeads, TritonHeads]) -> None:
            for first in range(0, self._heads, at_once):
                memory = scratch._memory(min(at_once, self._heads - first), self.passes)
                if expands:
                    expand_latents(
                        cache.key, self._tables, step, weights[0].weight, weights[1].weight, memory, first,
                        dependent=DEPENDENT,
                    )  # fmt: skip
                else:
                    expanded_prefill(query, memory, step, self.rule, out=out, first=first, dependent=DEPENDENT)

        return [partial(run, *each) for each in zip(self._caches, self._weights, strict=True)]

    def tune(self) -> None:
        """Print the time of attention over expanded keys with other tile sizes."""
        for config in (self.scratch.config, *TRIALS):
            trial = self.scratch
            before, trial.config = trial.config, config
            try:
                print(f"    {config}: {timed(self.passes_of(False, trial)):.1f} us", flush=True)
            except Exception as error:  # noqa: BLE001  a config that does not fit is a result
                print(f"    {config}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            trial.config = before


def measure(chunk: tuple[int, int, int], num_heads: int, *, tune: bool) -> tuple[tuple[str, ...], float]:
    """Return the table line of a chunk, and the relative difference of both forms."""
    bench = Bench(chunk, num_heads)
    absorbed, expanded = bench.forms()
    found, wanted = expanded[-1]().float(), absorbed[-1]().float()
    difference = float((found - wanted).norm() / wanted.norm())
    times = Times(*bench.parts(), (timed(absorbed), timed(expanded)))
    start, count, number = chunk
    pairs = number * num_heads * count * (start + (count + 1) / 2)
    product = num_heads * (LATENT.nope_dim + LATENT.value_dim) * LATENT.rank
    rates = (
        2e-6 * pairs * (2 * LATENT.rank + LATENT.rope_dim) / times.absorbed,
        2e-6 * bench.tokens * product / times.gemms,
        2e-6 * number * (start + count) * product / times.expand,
        2e-6 * pairs * (LATENT.query_dim + LATENT.value_dim) / times.attend,
    )
    if tune:
        print(f"  {number} x {count} after {start}, {num_heads} heads", flush=True)
        bench.tune()
    gain = times.forms[0] / times.forms[1]
    return (
        f"{number} x {count} after {start}", *(f"{each:.1f}" for each in times.forms), f"{gain:.2f}x",
        f"{bench.takes or '-'}", "/".join(f"{each:.0f}" for each in bench.predicted), f"{bench.passes}",
        *(f"{rate:.0f}" for rate in rates), f"{difference:.1e}",
    ), difference  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="of a rank: V2-Lite has 16, V3 128")
    parser.add_argument("--only", help="only chunks whose name contains this")
    parser.add_argument("--tune", action="store_true", help="time further tile sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    header = (
        "chunks", "absorbed, us", "expanded, us", "gain", "takes", "predicted", "passes", "absorbed TFLOP/s",
        "gemms", "expand", "attend", "difference",
    )  # fmt: skip
    wrong, rows = [], []
    for num_heads in options.heads:
        lines = []
        for chunk in CHUNKS:
            name = f"{chunk[2]} x {chunk[1]} after {chunk[0]}"
            if options.only is not None and options.only not in name:
                continue
            line, difference = measure(chunk, num_heads, tune=options.tune)
            wrong += [] if difference < 2e-2 else [f"{name}: {difference:.1e}"]
            lines.append(line)
            rows.append({"heads": num_heads} | dict(zip(header, line, strict=True)))
            print(" | ".join(line), flush=True)
        publish(f"Prompt attention over latents, {num_heads} heads", header, lines, facts())
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if wrong:
        sys.exit(f"the forms found different numbers: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
