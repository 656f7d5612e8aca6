"""Steps with short chunks as graphs: captured on a GPU, repeated as functions elsewhere, with the same logic around."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.config.model import Heads
from quire.config.speculation import SpeculationConfig
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker.decode_graphs import DecodeGraphs
from quire.runtime.worker.short_graphs import AllGraphs, ShortGraphs, ShortKind
from quire.types.step import Chunk, StepPlan
from tests.unit.runtime.worker.test_decode_graphs import Recorder
from tiny_models import DEVICE, VOCAB, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

ROWS, PROMPT = 6, [5, 6, 7]
WAYS: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.0},
    1: {"temperature": 0.9, "top_p": 0.9},
    2: {"temperature": 1.0},
}
DRAFTS = SpeculationConfig(method="ngram", num_tokens=8)


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(2, 1, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def bench(attention: str) -> Bench:
    config = replace(engine_config(rows=ROWS, num_blocks=64, max_len=64, budget=32), speculation=DRAFTS)
    kernels = "triton" if attention == "triton" else "torch"
    num_samples = config.scheduler.num_samples
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), kernels, num_samples)  # type: ignore[arg-type]
    return Bench(checkpoint(), config, attention=attention, sampler=sampler)


def short_of(made: Bench) -> tuple[ShortGraphs, Recorder]:
    graphs = made.worker._graphs
    assert isinstance(graphs, AllGraphs)
    recorder = Recorder(graphs.short._capture)
    graphs.short._capture = recorder
    made.kept = dict(graphs.short._graphs)  # that of the prompts: the memory of graphs is given back with the last one
    graphs.short._graphs.clear()
    return graphs.short, recorder


def begun(attention: str, rows: list[int], **more: Any) -> Bench:
    made = bench(attention)
    for row in rows:
        made.add(row, PROMPT, seed=row, **WAYS[row], **more)
    made.run(chunks=[Chunk(row, 0, 3, (row,)) for row in rows])
    return made


@cache
def plain(row: int, count: int = 9) -> list[int]:
    """What a row decodes alone, one token after the other."""
    made = begun("reference", [row])
    for _ in range(count - 1):
        made.run(decode=[row])
    return made.tokens[row][3:]


def test_one_graph_verifies_drafts_beside_decoding_rows() -> None:
    made = begun("triton", [0, 1, 2])
    short, recorder = short_of(made)
    for row, right in ((0, 3), (1, 2)):  # both drafts are right at first, and then wrong
        wanted = plain(row)
        made.write(row, 4, [*wanted[1 : 1 + right], (wanted[1 + right] + 1) % VOCAB])
    made.run(decode=[2], chunks=[Chunk(0, 3, 5, (0,), num_sampled=5), Chunk(1, 3, 4, (1,), num_sampled=4)])
    samples = made.result.token_ids.tolist()
    assert samples[0] == plain(2)[1]
    assert samples[1:5] == plain(0)[1:5]
    assert samples[6:9] == plain(1)[1:4]
    assert made.worker.rows.lengths[[0, 1, 2]].tolist() == [8, 7, 5]  # a row that verifies does not grow
    assert list(short._graphs) == [ShortKind(16, top_k_top_p=True)]

    for row, right in ((0, 3), (1, 2)):
        made.write(row, 4 + right, [plain(row)[1 + right]])
    made.run(decode=[0, 2, 1])
    assert made.result.token_ids.tolist() == [plain(0)[5], plain(2)[2], plain(1)[4]]
    assert (recorder.recorded, recorder.replayed) == (1, 1)
    made.worker.check()


def test_a_small_step_uses_the_graph_of_a_larger_bucket_until_its_kind_has_occurred_often() -> None:
    made = begun("triton", [0])
    short, recorder = short_of(made)
    with torch.inference_mode():
        short.capture(16)
    wanted, length = plain(0, count=30), 4
    for _ in range(9):
        made.write(0, length, [wanted[length - 2], wanted[length - 2 + 1]][:2])
        made.run(chunks=[Chunk(0, length - 1, 3, (0,), num_sampled=3)])
        assert made.result.token_ids.tolist() == wanted[length - 2 : length + 1]
        length += 2
    assert [kind.bucket for kind in short._graphs] == [16, 8]
    assert recorder.replayed == 9


def test_a_short_chunk_that_samples_only_at_its_end_grows_its_row() -> None:
    made = begun("triton", [0, 2])
    _, recorder = short_of(made)
    made.write(0, 4, plain(0)[1:3])
    made.write(2, 4, plain(2)[1:2])
    made.run(chunks=[Chunk(0, 3, 3, (0,)), Chunk(2, 3, 2, ())])  # the second samples nothing
    assert made.result.token_ids.tolist() == [plain(0)[3]]
    assert made.worker.rows.lengths[[0, 2]].tolist() == [7, 5]
    assert recorder.replayed == 1
    made.run(decode=[0])
    assert made.result.token_ids.tolist() == [plain(0)[4]]
    made.worker.check()


@pytest.mark.parametrize(
    ("plan", "taken"),
    [
        (StepPlan(0, chunks=(Chunk(0, 0, 8, (0,)),)), True),
        (StepPlan(0, chunks=(Chunk(0, 0, 17, (0,), num_sampled=17),)), True),
        (StepPlan(0, chunks=(Chunk(0, 0, 9, (0,)),)), False),  # a prompt
        (StepPlan(0, chunks=(Chunk(0, 0, 4, (0, 1)),)), False),  # forks
        (StepPlan(0, chunks=(Chunk(0, 0, 60, (0,), 60), Chunk(1, 0, 5, (1,), 5))), False),  # too many tokens
        (StepPlan(0, chunks=(Chunk(0, 0, 4, (0,)),), guided=True), False),
    ],
)
def test_graphs_take_only_steps_with_short_chunks(plan: StepPlan, taken: bool) -> None:
    made = begun("triton", [0])
    assert made.worker._by_graph(plan) == taken


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"frequency_penalty": 0.5}])
def test_rows_that_need_more_than_a_token_run_without_a_graph(asked: dict[str, Any]) -> None:
    made, wanted = begun("triton", [0], **asked), begun("reference", [0], **asked)
    _, recorder = short_of(made)
    for each in (made, wanted):
        each.write(0, 4, [9, 11])
        each.run(chunks=[Chunk(0, 3, 3, (0,), num_sampled=3)])
    assert made.result.token_ids.tolist() == wanted.result.token_ids.tolist()
    assert recorder.recorded == 0


def test_engines_without_drafts_have_no_graphs_for_short_chunks() -> None:
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64)
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), "triton")
    made = Bench(checkpoint(), config, attention="triton", sampler=sampler)
    assert isinstance(made.worker._graphs, DecodeGraphs)


@pytest.mark.skipif(DEVICE != "cpu", reason="processes go on to compile")
def test_remaining_preparation_is_done_later_and_changes_no_row_or_block() -> None:
    made, other = begun("triton", [0, 1]), begun("triton", [0, 1])
    made.worker.prepare(0.0)
    graphs = made.worker._graphs
    assert isinstance(graphs, AllGraphs)
    assert len(graphs.decode._graphs) == 1
    steps = 0
    while made.worker.prepare_more():
        steps += 1
    assert steps > len(graphs.decode._graphs) >= len(graphs.decode.buckets)
    assert len(graphs.short._graphs) >= len(graphs.short.buckets)
    made.worker.check()
    assert made.run(decode=[0, 1]) == other.run(decode=[0, 1])
