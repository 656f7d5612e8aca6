"""Guided steps: the forward pass is launched first, the masks of allowed tokens come later, then tokens are sampled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.config.model import Heads
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker.decode_graphs import DecodeGraphs
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.step import Chunk, Masks, StepPlan, StepResult
from tiny_models import DEVICE, VOCAB, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config
from worker_executor import TinyEngine

ROWS, WORDS = 6, -(-VOCAB // 32)
PROMPTS = {0: [5, 6, 7], 1: [11, 12], 2: [9], 3: [8, 4], 4: [1, 2, 3, 4]}
WAYS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"temperature": 0.8, "seed": 3},
    2: {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    3: {"temperature": 0.9, "seed": 6},
    4: {"temperature": 1.0, "top_k": 7, "seed": 5},
}


@pytest.fixture(params=["reference", "triton"])
def attention(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return str(request.param)


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(2, 1, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def bench(attention: str, **settings: Any) -> Bench:
    """With the sampler that an executor gives it."""
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64, **settings)
    kernels = "triton" if attention == "triton" else "torch"
    num_samples = config.scheduler.num_samples
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), kernels, num_samples)  # type: ignore[arg-type]
    return Bench(checkpoint(), config, attention=attention, sampler=sampler)


class TwoPhases:
    """A worker whose every plan becomes a guided one: the masks of the plan are supplied after it was begun.

    Masks that did not change since they were last supplied for the row are said to be the same.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._last: dict[int, npt.NDArray[np.uint32]] = {}
        self.unchanged = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, plan: StepPlan) -> StepOutput:
        for row in plan.released:
            self._last.pop(row, None)
        lengths = self._worker.rows.lengths.copy()
        self._worker.begin(replace(plan, masks=None, guided=True))
        sampled = [row for row in set(plan.sample_rows.tolist()) if row not in {new.row for new in plan.new_rows}]
        written = {write.row for write in plan.writes}
        assert all(self._worker.rows.lengths[row] == lengths[row] for row in sampled if row not in written)
        return self._worker.supply_masks(None if plan.masks is None else self._with_changes(plan, plan.masks))

    def _with_changes(self, plan: StepPlan, masks: Masks) -> Masks:
        changed = []
        for row, bits in zip(plan.sample_rows[masks.samples].tolist(), masks.bits, strict=True):
            changed.append(row not in self._last or not np.array_equal(self._last[row], bits))
            self._last[row] = bits.copy()
        self.unchanged += changed.count(False)
        return Masks(masks.samples, masks.bits, np.array(changed))


def guided(made: Bench) -> Bench:
    made.worker = TwoPhases(made.worker)  # type: ignore[assignment]
    return made


def masks(**allowed: list[int]) -> Masks:
    """Of samples by their place: `p0=[3, 4]`."""
    bits = np.zeros((len(allowed), WORDS), dtype=np.uint32)
    for line, tokens in enumerate(allowed.values()):
        for token in tokens:
            bits[line, token // 32] |= np.uint32(1 << (token % 32))
    return Masks(np.array([int(place[1:]) for place in allowed], dtype=np.int32), bits)


def start(made: Bench, rows: list[int], **more: Any) -> None:
    for row in rows:
        made.add(row, PROMPTS[row], **{**WAYS[row], **more})
    made.run(chunks=[Chunk(row, 0, len(PROMPTS[row]), (row,)) for row in rows])


def begin(made: Bench, decode: list[int], step: int = 90) -> None:
    """A guided decode step, by hand."""
    for row in decode:
        made.reserve(row, len(made.tokens[row]) + 4)
    made.run()  # the blocks
    made.worker.begin(StepPlan(step, np.array(decode, dtype=np.int32), guided=True))


def tokens_of(output: StepOutput) -> list[int]:
    return output.result([tensor.cpu() for tensor in output.tensors]).token_ids.tolist()


ODD, EVEN = list(range(1, VOCAB, 2)), list(range(0, VOCAB, 2))


def story(made: Bench) -> None:
    """Masked and plain rows, chunks, a fork, penalties, a draft, rows that go and come."""
    start(made, [0, 1, 4])
    made.run(decode=[1, 0, 4], masks=masks(p0=ODD, p2=EVEN))
    made.run(decode=[1, 0, 4], masks=masks(p0=ODD, p2=ODD))  # row 1 keeps its mask
    made.add(2, PROMPTS[2], **WAYS[2])
    made.run(decode=[1, 0, 4], chunks=[Chunk(2, 0, 1, (2,))], masks=masks(p0=ODD, p3=EVEN))
    made.run(decode=[4, 2, 1], masks=masks(p1=EVEN, p2=ODD))
    made.run(decode=[4, 1])  # nobody is masked
    made.run(decode=[2, 1, 4], masks=masks(p0=EVEN))
    made.release(1)
    made.add(1, PROMPTS[1], **{**WAYS[1], "presence_penalty": 0.5})
    made.run(decode=[2, 4], chunks=[Chunk(1, 0, 2, (1,))], masks=masks(p2=ODD))
    made.run(decode=[2, 4, 1], masks=masks(p2=ODD, p0=ODD))
    made.write(2, len(made.tokens[2]), [31, 33])
    length = len(made.tokens[2])
    verify = Chunk(2, length - 3, 3, (2,), num_sampled=3)
    made.run(decode=[4], chunks=[verify], masks=masks(p1=ODD, p2=EVEN, p0=ODD))
    made.write(2, length, [made.result.token_ids.tolist()[3]])
    made.run(decode=[4, 2], masks=masks(p1=ODD, p0=ODD))


def test_masks_supplied_later_give_the_tokens_of_masks_in_the_plan(attention: str) -> None:
    before, after = bench(attention), guided(bench(attention))
    story(before)
    story(after)
    assert after.tokens == before.tokens
    assert after.worker.unchanged > 3
    assert after.tokens[4][5] in EVEN
    assert after.tokens[4][6] in ODD


def test_torch_and_triton_choose_the_same_tokens_under_masks_supplied_later() -> None:
    pytest.importorskip("triton")
    plain, triton = guided(bench("reference")), guided(bench("triton"))
    story(plain)
    story(triton)
    assert triton.tokens == plain.tokens


def test_a_guided_step_samples_nothing_before_its_masks_come(attention: str) -> None:
    made = bench(attention)
    start(made, [0, 1])
    rows = made.worker.rows
    lengths, held = rows.lengths.copy(), rows.tokens.clone()
    begin(made, [0, 1])
    assert (rows.lengths == lengths).all()
    assert torch.equal(rows.tokens, held)
    made.worker.check()
    found = tokens_of(made.worker.supply_masks(masks(p1=[77])))
    assert found[1] == 77
    assert rows.tokens[1, lengths[1]] == 77
    assert (rows.lengths[:2] == lengths[:2] + 1).all()
    made.worker.check()


def test_samples_without_a_mask_and_steps_without_masks_are_not_constrained(attention: str) -> None:
    free, made = bench(attention), bench(attention)
    for each in (free, made):
        start(each, [0, 1])
    wanted = [free.run(decode=[0, 1]), free.run(decode=[0, 1])]
    begin(made, [0, 1])
    assert tokens_of(made.worker.supply_masks(None)) == [wanted[0][0], wanted[0][1]]
    made.worker.begin(StepPlan(91, np.array([0, 1], dtype=np.int32), guided=True))
    nobody = Masks(np.zeros(0, dtype=np.int32), np.zeros((0, WORDS), dtype=np.uint32), np.zeros(0, dtype=np.bool_))
    assert tokens_of(made.worker.supply_masks(nobody)) == [wanted[1][0], wanted[1][1]]


def test_a_row_is_not_constrained_by_its_mask_of_an_earlier_step(attention: str) -> None:
    made = bench(attention)
    start(made, [0])
    begin(made, [0])
    assert tokens_of(made.worker.supply_masks(masks(p0=[40]))) == [40]
    alone = bench("reference")
    alone.add(0, [*made.tokens[0], 40])
    alone.run(chunks=[Chunk(0, 0, 5, (0,))])
    made.worker.begin(StepPlan(91, np.array([0], dtype=np.int32), guided=True))
    assert tokens_of(made.worker.supply_masks(None)) == alone.result.token_ids.tolist()


def test_a_new_sequence_in_a_row_never_has_the_mask_of_the_old_one(attention: str) -> None:
    made = bench(attention)
    start(made, [0])
    begin(made, [0])
    same = np.array([False])
    assert tokens_of(made.worker.supply_masks(replace(masks(p0=[40]), changed=~same))) == [40]
    made.tokens[0].append(40)
    made.release(0)
    start(made, [0])
    begin(made, [0])
    assert tokens_of(made.worker.supply_masks(replace(masks(p0=[41]), changed=same))) == [41]


def test_a_mask_is_the_last_supplied_one_also_after_another_one_that_a_plan_had(attention: str) -> None:
    made = bench(attention)
    start(made, [0])
    begin(made, [0])
    made.worker.supply_masks(replace(masks(p0=[40]), changed=np.array([True])))
    made.tokens[0].append(40)
    assert made.run(decode=[0], masks=masks(p0=[50])) == {0: 50}
    begin(made, [0])
    assert tokens_of(made.worker.supply_masks(replace(masks(p0=[40]), changed=np.array([False])))) == [40]


def test_a_mask_is_the_last_supplied_one_also_after_the_masks_of_a_draft(attention: str) -> None:
    made = guided(bench(attention))
    start(made, [0])
    made.run(decode=[0], masks=masks(p0=[40]))
    made.write(0, 5, [6])
    made.run(chunks=[Chunk(0, 4, 2, (0,), num_sampled=2)], masks=masks(p0=[50], p1=[51]))
    assert made.result.token_ids.tolist() == [50, 51]
    made.write(0, 5, [50])
    assert made.run(decode=[0], masks=masks(p0=[51])) == {0: 51}
    assert made.worker.unchanged == 1


def test_masks_may_be_overwritten_once_they_were_supplied_and_lines_may_lie_apart(attention: str) -> None:
    made = bench(attention)
    start(made, [0, 1])
    table = np.zeros((3, WORDS + 3), dtype=np.uint32)
    table[0, 1], table[2, 2] = 1 << 8, 1 << 1  # tokens 40 and 65
    begin(made, [0, 1])
    both = np.array([0, 1], dtype=np.int32)
    output = made.worker.supply_masks(Masks(both, table[::2, :WORDS], np.array([True, True])))
    table[:] = 0
    assert tokens_of(output) == [40, 65]
    made.worker.begin(StepPlan(91, both, guided=True))
    table[0, 1], table[2, 2] = 1 << 8, 1 << 1
    output = made.worker.supply_masks(Masks(both, table[::2, :WORDS], np.array([False, False])))
    assert tokens_of(output) == [40, 65]


@pytest.mark.parametrize("words", [WORDS - 1, WORDS + 2])
def test_tokens_beyond_the_mask_are_banned_and_mask_bits_beyond_the_vocabulary_are_ignored(
    attention: str, words: int
) -> None:
    made = bench(attention)
    start(made, [0])
    begin(made, [0])
    first = np.zeros(1, dtype=np.int32)
    made.worker.supply_masks(Masks(first, np.full((1, WORDS), 2**32 - 1, dtype=np.uint32)))
    made.worker.begin(StepPlan(91, first, guided=True))
    bits = np.zeros((1, words), dtype=np.uint32)
    bits[0, WORDS:] = 2**32 - 1
    output = made.worker.supply_masks(Masks(first, bits))
    result = output.result([tensor.cpu() for tensor in output.tensors])
    assert [failure.row for failure in result.failures] == [0]


def test_only_the_row_for_which_the_grammar_allows_nothing_fails(attention: str) -> None:
    made = bench(attention)
    start(made, [0, 1, 2])
    begin(made, [0, 1, 2])
    output = made.worker.supply_masks(masks(p0=[40], p2=[]))
    result = output.result([tensor.cpu() for tensor in output.tensors])
    assert result.token_ids[0] == 40
    assert [(failure.row, "grammar" in failure.reason) for failure in result.failures] == [(2, True)]


def test_only_the_row_that_cannot_be_added_fails_in_a_guided_step(attention: str) -> None:
    made = guided(bench(attention))
    start(made, [0])
    made.add(1, [1, VOCAB + 4])
    made.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))], masks=masks(p0=[40]))
    assert [failure.row for failure in made.result.failures] == [1]
    assert made.tokens[0][-1] == 40
    made.run(decode=[0, 1], masks=masks(p0=[41], p1=[42]))
    assert made.tokens[0][-1] == 41


def test_samples_of_several_rounds_keep_their_own_masks(attention: str) -> None:
    made = bench(attention)
    made.worker._runner._num_samples = 2
    made = guided(made)
    start(made, [0, 1, 3])
    made.run(decode=[0, 1, 3], chunks=[], masks=masks(p0=[40], p1=[41], p2=[42]))
    made.write(1, len(made.tokens[1]), [7])
    chunk = Chunk(1, len(made.tokens[1]) - 2, 2, (1,), num_sampled=2)
    made.run(decode=[0, 3], chunks=[chunk], masks=masks(p0=[50], p1=[51], p2=[52], p3=[53]))
    assert made.result.token_ids.tolist() == [50, 51, 52, 53]


def test_a_guided_plan_without_tokens_updates_rows_and_samples_nothing(attention: str) -> None:
    made = guided(bench(attention))
    made.add(0, PROMPTS[0])
    assert made.run() == {}
    assert made.run(chunks=[Chunk(0, 0, 3, (0,))], masks=masks(p0=[40])) == {0: 40}


def test_plans_and_masks_out_of_order_are_refused_with_what_is_missing(attention: str) -> None:
    made = bench(attention)
    start(made, [0])
    plain = StepPlan(7, np.array([0], dtype=np.int32))
    with pytest.raises(RuntimeError, match="no guided plan waits"):
        made.worker.supply_masks(None)
    with pytest.raises(RuntimeError, match="guided plans are begun"):
        made.worker.execute(replace(plain, guided=True))
    with pytest.raises(RuntimeError, match="its masks must come with supply_masks"):
        made.worker.begin(replace(plain, guided=True, masks=masks(p0=[1])))
    begin(made, [0])
    for launch in (made.worker.execute, made.worker.begin):
        with pytest.raises(RuntimeError, match="step 7 was launched while step 90 waits for its masks"):
            launch(plain)
    made.worker.supply_masks(None)
    with pytest.raises(RuntimeError, match="no guided plan waits"):
        made.worker.supply_masks(None)
    made.worker.execute(plain)


def test_a_drafter_follows_a_guided_step_after_it_sampled() -> None:
    seen: list[list[int]] = []

    class Drafter:
        def follow(self, plan: StepPlan, token_ids: torch.Tensor) -> Any:
            seen.append(token_ids.tolist())
            return made.output.drafts

    made = bench("reference")
    start(made, [0])
    made.worker.drafter = Drafter()  # type: ignore[assignment]
    begin(made, [0])
    seen.clear()
    made.worker.supply_masks(masks(p0=[40]))
    assert seen == [[40]]


def test_decode_steps_run_by_graphs_and_unchanged_masks_are_not_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    made = bench("triton")
    graphs = made.worker._graphs
    assert isinstance(graphs, DecodeGraphs)
    start(made, [0, 1, 3])
    ran: list[int] = []
    monkeypatch.setattr(made.worker._runner, "begin", lambda plan, failed: ran.append(plan.step))
    stored = made.sampler.choice.masks
    sent: list[list[int]] = []
    send = stored._send
    monkeypatch.setattr(stored, "_send", lambda rows, bits: (sent.append(rows.tolist()), send(rows, bits)))
    made = guided(made)
    for first, second in ((ODD, EVEN), (ODD, ODD), (ODD, ODD), (EVEN, ODD)):
        made.run(decode=[1, 0, 3], masks=masks(p0=first, p2=second))
        assert made.tokens[1][-1] in first
        assert made.tokens[3][-1] in second
    assert sent == [[1, 3], [3], [1]]
    assert ran == []
    assert {(kind.bucket, kind.guided) for kind in graphs._graphs} == {(4, True)}


def test_guided_graphs_report_logprobs_before_masks() -> None:
    pytest.importorskip("triton")
    plain, triton = guided(bench("reference")), guided(bench("triton"))
    for made in (plain, triton):
        start(made, [0, 1], logprobs=3)
        made.run(decode=[0, 1], masks=masks(p0=[40], p1=EVEN))
    graphs = triton.worker._graphs
    assert [(kind.guided, kind.listed) for kind in graphs._graphs] == [(True, 8)]
    assert plain.tokens == triton.tokens
    for one, other in zip(triton.result.logprobs, plain.result.logprobs, strict=True):
        assert one.entry.token_ids.tolist() == other.entry.token_ids.tolist()
        assert one.entry.rank == other.entry.rank
        np.testing.assert_allclose(one.entry.logprobs, other.entry.logprobs, atol=1e-4)
    assert triton.result.logprobs[0].entry.rank > 1


def test_candidates_of_a_guided_step_are_those_the_mask_allows(attention: str) -> None:
    made = guided(bench(attention))
    made.add(0, PROMPTS[0], num_candidates=3)
    made.run(chunks=[Chunk(0, 0, 3, (0,))], masks=masks(p0=[40, 41, 42]))
    made.run(decode=[0], masks=masks(p0=[50, 51, 52]))
    found = made.result.candidates
    assert found is not None
    assert sorted(found.token_ids[0].tolist()) == [50, 51, 52]


def test_capturing_guided_graphs_changes_no_row_and_no_block() -> None:
    pytest.importorskip("triton")
    from quire.runtime.worker.decode_forward import DecodeKind

    made = bench("triton")
    start(made, [0, 1])
    rows, memory = made.worker.rows, made.worker.cache.blocks
    before = [each.clone() for each in (rows.tokens, rows.history.lengths, memory)]
    with torch.inference_mode():
        for kind in (DecodeKind(1, guided=True), DecodeKind(4, top_k_top_p=True, listed=8, guided=True)):
            made.worker._graphs._graphs.capture(kind)  # type: ignore[attr-defined]
    for was, each in zip(before, (rows.tokens, rows.history.lengths, memory), strict=True):
        assert torch.equal(was, each)
    made.worker.check()


class Ranks:
    """The workers of two ranks, driven as one worker."""

    def __init__(self, worker: Worker) -> None:
        sizes = {"rows": ROWS, "num_blocks": 64, "max_len": 64}
        self._executor = TinyEngine(checkpoint(), attention="triton", tensor=2, **sizes).executor
        self.rows, self.graphs = self._executor.workers[0].rows, self._executor.workers[0]._graphs

    def begin(self, plan: StepPlan) -> None:
        self._executor.launch(plan)

    def supply_masks(self, masks: Masks | None) -> StepResult:
        self._executor.supply_masks(masks)
        return self._executor.collect()

    def check(self) -> None:
        for worker in self._executor.workers:
            worker.check()

    def close(self) -> None:
        self._executor.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU captures no graphs in two threads")
def test_a_rank_that_did_not_sample_a_row_in_between_uses_its_newer_mask() -> None:
    """Steps of decoding run as graphs, to which every rank supplies all masks; a step with a chunk does not, and each
    rank gets the masks of the rows that it samples: of four rows the first two by the first rank."""
    pytest.importorskip("triton")
    made = bench("triton")
    ranks = Ranks(made.worker)
    made.worker = TwoPhases(ranks)  # type: ignore[arg-type, assignment]
    for row in (0, 1, 2, 3):
        made.add(row, PROMPTS[row])
        made.run(chunks=[Chunk(row, 0, len(PROMPTS[row]), (row,))])
    assert made.run(decode=[0, 1, 2, 3], masks=masks(p0=[40]))[0] == 40  # a graph
    made.add(4, PROMPTS[4])
    chunk = Chunk(4, 0, 2)  # samples nothing
    assert made.run(decode=[1, 2, 3, 0], chunks=[chunk], masks=masks(p3=[50]))[0] == 50  # by the second rank
    assert made.run(decode=[0, 1, 2, 3], masks=masks(p0=[50]))[0] == 50  # a graph, and the mask is the same
    assert made.worker.unchanged == 1
    assert len(ranks.graphs._graphs) > 0
    ranks.close()
