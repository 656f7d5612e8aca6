"""The indexer's keys in the cache, and which tokens of a step attend to chosen ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from family_models import FamilyCase
from quire.config.engine import EngineConfig
from quire.config.memory import plan_memory
from quire.config.model import Heads
from quire.config.sizes import GIB
from quire.kernels.reference.chosen import attend_chosen
from quire.kernels.reference.quantize import LARGEST
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, divide_batch, layer_cache
from quire.runtime.layers import indexer
from quire.runtime.layers.indexer import TokenIndexer, read_latents
from tests.unit.config.machines import SERVER
from tiny_models import engine_config
from worker_executor import TinyEngine

SIZE = 4


def batch_of(lengths: list[int], chunks: list[tuple[int, int]]) -> AttentionBatch:
    begins = len(lengths) + np.cumsum([0, *(count for _, count in chunks)])
    spans = (
        ChunkSpan(int(begin), start, count, torch.arange(-(-(start + count) // SIZE)))
        for begin, (start, count) in zip(begins, chunks, strict=False)
    )
    tables, cache = torch.arange(len(lengths) * 8).view(-1, 8), layer_cache(torch.zeros(1, 64, 1, SIZE, 8), HEADS, 0)
    return AttentionBatch(np.array(lengths), tables, tuple(spans), SIZE, cache)


HEADS = Heads(3, 1, 8, 6)


def test_the_tokens_of_a_batch_are_divided_at_a_position() -> None:
    batch, places, later = divide_batch(batch_of([30, 12, 7, 1], [(0, 5), (6, 9), (20, 3)]), 10)
    assert batch is not None
    assert batch.lengths.tolist() == [7, 1]
    assert batch.block_ids.tolist() == [[16, 17], [24, 25]]
    assert batch.block_ids.is_contiguous()
    found = [(each.begin, each.start, each.num_tokens, len(each.block_ids)) for each in batch.chunks]
    assert found == [(2, 0, 5, 2), (7, 6, 4, 3)]
    assert places.tolist() == [2, 3, *range(4, 9), *range(9, 13)]
    assert [(each.begin, each.start, each.num_tokens) for each in later] == [
        (0, 29, 1), (1, 11, 1), (13, 10, 5), (18, 20, 3),
    ]  # fmt: skip
    assert divide_batch(batch_of([30], [(20, 3)]), 10)[0] is None


@pytest.mark.parametrize("backend", ["native", "gather"])
def test_only_tokens_beyond_the_number_of_chosen_ones_attend_by_torch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(query))
        return attend_chosen(query, *rest)

    monkeypatch.setattr(indexer, "attend_chosen", counted)
    case = FamilyCase("deepseek_v32", tmp_path)  # 3 layers, each attends to 8 tokens
    engine = TinyEngine(case.checkpoint(), attention=backend, block_size=3)
    answers = engine.answers([[5, 6, 7], [9] * 20, [4, 3]], max_tokens=4)
    assert sum(counts) == 3 * (20 + 3 - 8)
    alone = TinyEngine(case.checkpoint(), attention=backend, block_size=3, budget=5)
    assert answers == [alone.answers([prompt], max_tokens=4)[0] for prompt in ([5, 6, 7], [9] * 20, [4, 3])]


def chooser(tmp_path: Path, **changes: Any) -> tuple[TinyEngine, TokenIndexer]:
    engine = TinyEngine(FamilyCase("deepseek_v32", tmp_path).checkpoint(), **changes)
    found = next(each for each in engine.executor.worker._runner._model.modules() if isinstance(each, TokenIndexer))
    return engine, found


def test_large_keys_of_an_indexer_are_scaled_into_the_range_of_float8(tmp_path: Path) -> None:
    engine, own = chooser(tmp_path, kv_dtype="float8")
    (cache, *_) = engine.executor.worker.cache.layers
    weight = own.k_norm.weight.data
    weight[0], weight[1] = 1_000.0, 0.0
    keys = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)) * 1_000.0
    keys[4, 2] = float("nan")
    found = own._in_range(keys, cache)
    assert found[:4].abs().max() <= LARGEST
    assert found[4].isnan().tolist() == keys[4].isnan().tolist()
    torch.testing.assert_close(found[:4] / found[0, 0], keys[:4] / keys[0, 0])  # their order is as before
    weight[0] = 1.0
    assert torch.equal(own._in_range(keys[:4] / 1_000.0, cache), keys[:4] / 1_000.0)
    answer = engine.answers([[9] * 20], max_tokens=4)
    weight[0] = 1_000.0
    assert engine.finished["p0-0"].error is None
    engine.core.reset_cache()
    assert len(engine.answers([[9] * 20], max_tokens=4)[0][0]) == len(answer[0][0])


def test_choosing_is_in_the_memory_plan(tmp_path: Path) -> None:
    model = FamilyCase("deepseek_v32", tmp_path).checkpoint().config
    assert model.indexer is not None
    config: EngineConfig = engine_config(max_len=512)
    with_indexer, without = (
        plan_memory(each, config, SERVER, 80 * GIB).activations for each in (model, replace(model, indexer=None))
    )
    sizes = (model.heads.dim, model.heads.num_query, config.scheduler.max_num_batched_tokens, 512)
    assert with_indexer - without == model.indexer.scratch_memory(*sizes) > 0


def test_latents_are_read_by_position() -> None:
    memory = torch.randn(1, 16, 1, SIZE, 8)
    found = read_latents(layer_cache(memory, HEADS, 0), torch.tensor([7, 3]), torch.tensor([[0, 5], [7, 2]]))
    places = [[(7, 0), (3, 1)], [(3, 3), (7, 2)]]
    assert torch.equal(found, torch.stack([torch.stack([memory[0, b, 0, i] for b, i in row]) for row in places]))
