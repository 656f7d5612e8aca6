"""Batches that numpy builds in host memory equal those that torch builds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from family_models import FamilyCase
from quire.config.model import Heads
from quire.runtime.attention.native import NativePlan
from quire.runtime.layers.step import ForwardStep
from quire.runtime.worker import parts
from quire.runtime.worker.batch import Batch, BatchBuilder
from quire.runtime.worker.host_batch import HostBatchBuilder
from quire.runtime.worker.rows import Rows
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan
from tiny_models import DEVICE, Bench, engine_config, greedy_reference, random_checkpoint, tiny_config
from window_bench import WindowBench, groups_of

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="for rows in host memory")
WINDOWS: dict[str, tuple[int | None, ...]] = {"none": (None, None), "some": (7, 7, 7, None), "all": (7, 5)}


def check_same(own: Any, other: Any) -> None:
    if isinstance(own, Tensor):
        assert own.dtype == other.dtype
        assert own.is_contiguous()
        assert torch.equal(own, other)
    elif isinstance(own, tuple):
        assert len(own) == len(other)
        for one, another in zip(own, other, strict=True):
            check_same(one, another)
    elif isinstance(own, NativePlan):
        check_same((own.spans, own.tables), (other.spans, other.tables))


def check_same_step(own: ForwardStep, other: ForwardStep) -> None:
    for field in fields(ForwardStep):
        check_same(getattr(own, field.name), getattr(other, field.name))
    for one, another in zip(own.windows, other.windows, strict=True):
        check_same((one.slots, one.attention), (another.slots, another.attention))


class ComparedBuilder(HostBatchBuilder):
    """Builds every batch a second time by torch."""

    num_compared = 0

    def build(self, plan: StepPlan) -> Batch:
        own = super().build(plan)
        other = BatchBuilder(self._rows, self._cache, self._backend, self._states, self._images, self.adapters).build(
            plan
        )
        check_same_step(own.step, other.step)
        check_same((own.rows, own.wanted, own.spread), (other.rows, other.wanted, other.spread))
        assert own.samples.lengths.tolist() == other.samples.lengths.tolist()
        ComparedBuilder.num_compared += 1
        return own


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("pattern", WINDOWS)
def test_numpy_builds_the_same_batches_as_torch(pattern: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "HostBatchBuilder", ComparedBuilder)
    windows = WINDOWS[pattern]
    made = random_checkpoint(tiny_config(num_layers=len(windows), windows=windows, heads=Heads(4, 2, 16)))
    if pattern == "none":
        bench: Bench = Bench(made, engine_config(block_size=block_size, num_blocks=512), attention="native")
    else:
        config = engine_config(groups=groups_of(made.config), block_size=block_size, num_blocks=512)
        bench = WindowBench(made, config, attention="native")
    before = ComparedBuilder.num_compared
    bench.add(0, [(5 * i) % 90 for i in range(23)])
    bench.add(1, [3, 1, 4])
    bench.run(chunks=[Chunk(0, 0, 11), Chunk(1, 0, 3, (1,))])
    bench.run(decode=[1], chunks=[Chunk(0, 11, 12, (0,))])
    bench.run(decode=[1, 0])
    bench.add(2, bench.tokens[0], parent=0)
    bench.unshare_tail(2)
    for _ in range(5):
        bench.run(decode=[2, 1, 0])
    assert ComparedBuilder.num_compared - before == 8
    assert all(len(bench.tokens[row]) == length for row, length in enumerate((30, 11, 30)))
    bench.worker.check()


def test_numpy_builds_the_same_batches_for_layers_with_different_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(parts, "HostBatchBuilder", ComparedBuilder)
    case = FamilyCase("gemma4_text-moe", tmp_path)  # one head for all tokens, four in windows
    bench = Bench(case.checkpoint(), engine_config(block_size=4, num_blocks=64), attention="native")
    before = ComparedBuilder.num_compared
    prompts = [[(5 * i) % 90 for i in range(11)], [3, 1, 4]]
    for row, prompt in enumerate(prompts):
        bench.add(row, prompt)
    bench.run(chunks=[Chunk(0, 0, 11, (0,)), Chunk(1, 0, 3, (1,))])
    bench.run(decode=[0, 1])
    bench.run(decode=[1])
    assert ComparedBuilder.num_compared - before == 3
    for row, (prompt, count) in enumerate(zip(prompts, (2, 3), strict=True)):
        assert bench.tokens[row] == [*prompt, *greedy_reference(case.model, prompt, count)[0]]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_rows_grow_by_their_tokens_and_failures_are_kept_as_zero(count: int) -> None:
    rows = Rows(8, 16, 4, torch.device("cpu"))
    news = [
        NewRow(row, np.arange(2 + row, dtype=np.int32), 1, (), SamplingParams(), TokenRules(), sample_index=0, seed=0)
        for row in range(8)
    ]
    rows.place(news)
    chosen = np.arange(7, 7 - count, -1, dtype=np.int32)
    token_ids = torch.arange(50, 50 + count)
    token_ids[0] = -1
    rows.append(chosen, torch.from_numpy(chosen.astype(np.int64)), token_ids)
    for place, row in enumerate(chosen.tolist()):
        assert rows.tokens[row, 2 + row] == (0 if place == 0 else 50 + place)
    grown = [2 + row + (row in chosen.tolist()) for row in range(8)]
    assert rows.lengths.tolist() == grown
    rows.check()
