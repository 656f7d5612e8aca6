"""Steps with chunks as graphs: captured on a GPU, repeated as functions elsewhere, with the same logic around them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from quire.config.model import Heads
from quire.runtime.attention import triton as backend
from quire.runtime.worker import forward_graphs
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.device_batch import DeviceBatchBuilder
from quire.runtime.worker.forward_graphs import ForwardGraphs
from quire.types.step import Chunk
from tiny_models import (
    Bench,
    GreedySampler,
    MemoryCheckpoint,
    engine_config,
    mix_steps,
    random_checkpoint,
    tiny_config,
)

LONG = list(range(3, 27))


@pytest.fixture(autouse=True)
def capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(4, 2, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def both(**sampler: object) -> tuple[Bench, Bench, ForwardGraphs]:
    """A worker over the reference, one over graphs, and those."""
    made = [
        Bench(checkpoint(), engine_config(max_len=64), attention=kind, sampler=GreedySampler(**sampler))  # type: ignore[arg-type]
        for kind in ("reference", "triton")
    ]
    graphs = made[1].worker._runner._forward
    assert isinstance(graphs, ForwardGraphs)
    return made[0], made[1], graphs


def assert_same(plain: Bench, graphed: Bench) -> None:
    assert graphed.tokens == plain.tokens
    for row, seen in plain.sampler.seen.items():
        torch.testing.assert_close(torch.stack(graphed.sampler.seen[row]), torch.stack(seen), rtol=1e-4, atol=1e-4)


def test_steps_of_one_shape_run_by_one_graph_whatever_their_rows_and_lengths() -> None:
    plain, graphed, graphs = both()
    for made in (plain, graphed):
        mix_steps(made)
    assert_same(plain, graphed)
    assert set(graphs._graphs) == {
        StepShape(16, False, True, False),
        StepShape(16, True, True, False),
        StepShape(16, True, False, False),
    }


def test_a_shape_is_captured_when_it_has_occurred_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 2)
    plain, graphed, graphs = both()
    monkeypatch.setattr(graphs._capture, "is_idle", lambda: False)
    for made in (plain, graphed):
        made.add(0, LONG)
    captured = []
    for start in (0, 6, 12):
        for made in (plain, graphed):
            made.run(chunks=[Chunk(0, start, 6)])
        captured.append(len(graphs._graphs))
    for made in (plain, graphed):
        made.run(chunks=[Chunk(0, 18, 6, (0,))])
    assert captured == [0, 0, 1]
    assert_same(plain, graphed)


def test_a_step_larger_than_all_buckets_runs_without_padding_or_graph() -> None:
    plain, graphed, graphs = both()
    graphed.worker._runner._batches._buckets = (16,)  # type: ignore[attr-defined]
    for made in (plain, graphed):
        made.add(0, LONG)
        made.run(chunks=[Chunk(0, 0, 17)])
        made.run(chunks=[Chunk(0, 17, 7, (0,))])
    assert_same(plain, graphed)
    assert set(graphs._graphs) == {StepShape(16, False, True, False)}


def test_a_step_with_too_many_tiles_runs_without_padding_or_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SPARE_TILES", 1)
    plain, graphed, graphs = both()
    for made in (plain, graphed):
        for row in range(3):
            made.add(row, LONG[row : row + 4])
        made.run(chunks=[Chunk(row, 0, 4, (row,)) for row in range(3)])
        made.run(decode=[2, 0, 1])
    assert_same(plain, graphed)
    assert set(graphs._graphs) == {StepShape(16, True, False, False)}


def test_prompt_logprobs_and_forks_find_their_positions_in_a_padded_step() -> None:
    plain, graphed, _ = both()
    found: list[list[float]] = []
    for made in (plain, graphed):
        made.add(0, LONG[:10], prompt_logprobs=0)
        made.run(chunks=[Chunk(0, 0, 6)])
        found.append([value for table in made.prompt_tables(0) for value in table.logprobs.tolist()])
        made.add(1, LONG[:10])
        made.add(2, LONG[:10])
        made.run(chunks=[Chunk(0, 6, 4, (0, 1, 2))])
    assert_same(plain, graphed)
    assert plain.tokens[1] == plain.tokens[0]
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-4)


def test_padding_of_a_large_step_goes_on_with_the_wanted_tokens_as_a_step_without_a_graph_does() -> None:
    _, made, graphs = both()
    batches = made.worker._runner._batches
    assert isinstance(batches, DeviceBatchBuilder)
    sizes = [tuple(graphs(batches.blank_large(2, wanted)).shape) for wanted in (1, 3, None)]
    assert sizes == [(1, 32), (3, 32), (batches.blank_large(2).step.positions.shape[0], 32)]


def test_rehearsed_copies_change_no_block() -> None:
    _, made, _ = both()
    made.worker.cache.blocks.fill_(7.0)
    made.worker._runner._batches.rehearse_copies()  # type: ignore[attr-defined]
    assert bool((made.worker.cache.blocks == 7.0).all())
