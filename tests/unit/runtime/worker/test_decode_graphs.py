"""Decode steps as graphs: captured on a GPU, repeated as functions elsewhere, with the same logic around them."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.config.engine import row_buckets
from quire.config.model import Heads
from quire.runtime.layers.row_programs import RowKernel
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker import kind_graphs
from quire.runtime.worker.capture import Launch
from quire.runtime.worker.decode_forward import DecodeKind
from quire.runtime.worker.decode_graphs import DecodeGraphs
from quire.runtime.worker.parts import NoGraphs
from quire.types.step import Chunk
from row_bench import ReferenceKernel
from tiny_models import DEVICE, VOCAB, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

ROWS = 6
PROMPTS = {0: [5, 6, 7], 1: [11, 12], 2: [9], 4: [1, 2, 3, 4]}
WAYS = {
    0: {},
    1: {"temperature": 0.8, "seed": 3},
    2: {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    4: {"temperature": 1.0, "top_k": 7, "seed": 5},
}


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(2, 1, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def bench(attention: str, row_kernel: RowKernel | None = None) -> Bench:
    """With the sampler that an executor gives it."""
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64)
    kernels = "triton" if attention == "triton" else "torch"
    sampler = make_sampler(ROWS, VOCAB, torch.device(config.device.device), kernels)
    return Bench(checkpoint(), config, attention=attention, sampler=sampler, row_kernel=row_kernel)


class Recorder:
    """A Capture that counts; `launch` is what would be captured."""

    def __init__(self, inner: object) -> None:
        self.inner, self.recorded, self.replayed = inner, 0, 0

    def record(self, launch: Launch, rehearse: Launch) -> Launch:
        self.recorded += 1
        return partial(self._replay, self.inner.record(launch, rehearse))  # type: ignore[attr-defined]

    def _replay(self, launch: Launch) -> None:
        self.replayed += 1
        launch()


def graphs_of(made: Bench) -> tuple[DecodeGraphs, Recorder]:
    graphs = made.worker._graphs
    assert isinstance(graphs, DecodeGraphs)
    recorder = Recorder(graphs._capture)
    graphs._capture = recorder
    return graphs, recorder


def start(made: Bench, rows: list[int], **more: object) -> None:
    for row in rows:
        made.add(row, PROMPTS[row], **{**WAYS[row], **more})
    made.run(chunks=[Chunk(row, 0, len(PROMPTS[row]), (row,)) for row in rows])


def test_graphs_of_padded_steps_choose_what_the_reference_chooses() -> None:
    plain, triton = bench("reference"), bench("triton")
    _, recorder = graphs_of(triton)
    for made in (plain, triton):
        start(made, [0, 1, 4])
        made.run(decode=[1, 0, 4])  # three of four, with filters
        made.run(decode=[1, 0])  # two, without
        made.add(2, PROMPTS[2], **WAYS[2])
        made.run(decode=[1, 0, 4], chunks=[Chunk(2, 0, 1, (2,))])  # no graph
        made.release(0)
        made.run(decode=[2, 4, 1])
        made.run(decode=[4])
    assert triton.tokens == plain.tokens
    assert recorder.recorded == 2  # four rows with filters, also for one row, and two rows without
    assert recorder.replayed == 4


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference waits for the device, which no graph does")
def test_the_graph_of_a_single_row_runs_its_program() -> None:
    kernel = ReferenceKernel()
    plain, triton = bench("reference"), bench("triton", kernel)
    graphs, _ = graphs_of(triton)
    graphs.trace_row()
    (program,) = kernel.made  # before any graph is captured
    graphs.rehearse(DecodeKind(1))
    for made in (plain, triton):
        start(made, [0, 1])
        made.run(decode=[0])
        made.run(decode=[1])
    assert triton.tokens == plain.tokens
    assert kernel.made == [program]
    assert program.num_runs == 4  # when it was rehearsed, when it was captured, and for each token


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference waits for the device, which no graph does")
def test_a_single_row_that_is_too_long_runs_layer_by_layer() -> None:
    kernel = ReferenceKernel(longest=len(PROMPTS[0]) + 1)
    plain, triton = bench("reference"), bench("triton", kernel)
    graphs_of(triton)[0].trace_row()
    (program,) = kernel.made
    for made in (plain, triton):
        start(made, [0])
        for _ in range(4):
            made.run(decode=[0])
    assert triton.tokens == plain.tokens
    assert program.num_runs == 2  # when it was captured, and for the first token


def test_a_kind_uses_the_graph_of_a_larger_bucket_until_it_has_occurred_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind_graphs, "BORROWED_RUNS", 2)
    plain, triton = bench("reference"), bench("triton")
    graphs, _ = graphs_of(triton)
    buckets = []
    for made in (plain, triton):
        start(made, [0, 1, 2], temperature=0.0)
        made.run(decode=[0, 1, 2])
        for _ in range(4):
            made.run(decode=[1])
            buckets.append({kind.bucket for kind in graphs._graphs})
    assert buckets[4:] == [{4}, {4}, {1, 4}, {1, 4}]
    assert triton.tokens == plain.tokens


def test_the_same_rows_in_a_larger_bucket_leave_no_row_of_an_earlier_step_in_it() -> None:
    plain, triton = bench("reference"), bench("triton")
    graphs, _ = graphs_of(triton)
    for made in (plain, triton):
        start(made, [0, 1, 2], temperature=0.0)
        made.run(decode=[0, 1, 2])
    with torch.inference_mode():
        graphs.capture(1)
    for made in (plain, triton):
        made.run(decode=[1])
    del graphs._graphs[DecodeKind(1)]
    for made in (plain, triton):
        made.run(decode=[1])  # by the graph of four rows
    assert triton.tokens == plain.tokens
    assert triton.worker.rows.lengths.tolist() == plain.worker.rows.lengths.tolist() + [0] * (
        len(triton.worker.rows.lengths) - len(plain.worker.rows.lengths)
    )
    triton.worker.check()


def test_capturing_changes_no_row_and_no_block() -> None:
    made = bench("triton")
    graphs, _ = graphs_of(made)
    start(made, [0, 1])
    rows, memory = made.worker.rows, made.worker.cache.blocks
    before = [each.clone() for each in (rows.tokens, rows.history.lengths, memory)]
    with torch.inference_mode():
        for kind in (DecodeKind(1), DecodeKind(4, top_k_top_p=True), DecodeKind(2, listed=8)):
            graphs._graphs.capture(kind)
    for was, each in zip(before, (rows.tokens, rows.history.lengths, memory), strict=True):
        assert torch.equal(was, each)
    made.worker.check()


def test_padding_writes_nothing_anywhere() -> None:
    made = bench("triton")
    start(made, [0, 1, 2])
    memory = made.worker.cache.blocks
    made.reserve(0, 8)
    made.reserve(1, 8)
    made.reserve(2, 8)
    held = {block for row in (0, 1, 2) for block in made.tables[row]}
    free = [block for block in range(64) if block not in held]
    memory[:, free] = 7.0
    made.run(decode=[2, 0, 1])
    assert (memory[:, free] == 7.0).all()


def test_rows_are_written_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench("triton")
    graphs, _ = graphs_of(made)
    start(made, [0, 1])
    sent: list[list[int]] = []
    uploader = made.worker.rows.uploader
    upload_into = uploader.upload_into

    def spy(target: torch.Tensor, array: np.ndarray) -> None:
        sent.append(array.tolist())
        upload_into(target, array)

    monkeypatch.setattr(uploader, "upload_into", spy)
    made.run(decode=[0, 1])
    sent.clear()
    made.run(decode=[0, 1])
    assert sent == []
    made.run(decode=[1, 0])
    assert sent == [[1, 0], [1, 0]]
    assert graphs._forward.entries[:2].tolist() == [1, 0]


@pytest.mark.parametrize(
    "special",
    [{"presence_penalty": 0.5, "logit_bias": {5: 3.0}}, {"logprobs": 40}, {"logprobs": 0, "logprob_token_ids": [4]}],
)
def test_rows_that_need_more_than_a_token_and_short_logprob_lists_run_without_a_graph(
    special: dict[str, object],
) -> None:
    plain, triton = bench("reference"), bench("triton")
    _, recorder = graphs_of(triton)
    for made in (plain, triton):
        start(made, [0])
        made.add(1, PROMPTS[1], **{**WAYS[1], **special})
        made.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))])
        for _ in range(2):
            made.run(decode=[0, 1])
    assert triton.tokens == plain.tokens
    assert recorder.recorded == 0
    assert len(triton.result.logprobs) == len(plain.result.logprobs)
    triton.release(1)
    triton.run(decode=[0])
    assert recorder.replayed == 1


def test_graphs_report_the_logprobs_and_candidates_of_the_reference() -> None:
    plain, triton = bench("reference"), bench("triton")
    _, recorder = graphs_of(triton)
    for made in (plain, triton):
        start(made, [0])
        made.add(1, PROMPTS[1], **WAYS[1], logprobs=3)
        made.add(2, PROMPTS[2], num_candidates=6)
        made.add(4, PROMPTS[4], num_candidates=4, logprobs=0)
        made.run(decode=[0], chunks=[Chunk(row, 0, len(PROMPTS[row]), (row,)) for row in (1, 2, 4)])
    for decode in ([0, 1], [0, 4, 1, 2], [2], [0, 4, 1, 2]):
        plain.run(decode=decode)
        triton.run(decode=decode)
        wanted, found = plain.result, triton.result
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert [told.row for told in found.logprobs] == [told.row for told in wanted.logprobs]
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert one.entry.token_ids.tolist() == other.entry.token_ids.tolist()
            assert one.entry.rank == other.entry.rank
            np.testing.assert_allclose(one.entry.logprobs, other.entry.logprobs, atol=1e-4)
        assert (found.candidates is None) == (wanted.candidates is None)
        if found.candidates is not None and wanted.candidates is not None:
            assert found.candidates.samples.tolist() == wanted.candidates.samples.tolist()
            assert found.candidates.token_ids.tolist() == wanted.candidates.token_ids.tolist()
            np.testing.assert_allclose(found.candidates.scores, wanted.candidates.scores, atol=1e-4)
    assert recorder.replayed == 4
    assert recorder.recorded == 2  # the two steps of four rows are one graph, which also runs the smaller step


def test_a_failed_row_keeps_its_steps_out_of_graphs() -> None:
    made = bench("triton")
    _, recorder = graphs_of(made)
    start(made, [0])
    made.add(1, [1, VOCAB + 4])
    made.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))])
    made.run(decode=[0, 1])
    assert recorder.recorded == 0
    made.release(1)
    made.run(decode=[0])
    assert recorder.replayed == 1


def test_enforce_eager_captures_no_graph() -> None:
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64)
    eager = type(config.device)(config.device.device, "float32", "float32", enforce_eager=True)
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), "triton")
    made = Bench(checkpoint(), type(config)(config.cache, config.scheduler, eager), attention="triton", sampler=sampler)
    assert isinstance(made.worker._graphs, NoGraphs)


def test_buckets_end_with_the_number_of_rows() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(6) == (1, 2, 4, 6)
    assert row_buckets(256)[-2:] == (224, 256)
    assert row_buckets(5_000)[-1] == 1_024
