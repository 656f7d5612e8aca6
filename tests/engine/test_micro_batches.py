"""Micro-batches over the pretend executor: plans in flight have no row in common, every stage of a pipeline is busy,
and the tokens are those of one micro-batch. Random mixes of all features run in test_decoding_fuzz.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from harness import VOCABULARY, Harness
from quire.engine.decoding.tools import DecodingTools
from quire.engine.in_flight import InFlightStep, Pipeline
from quire.types.decoding import BeamRules
from quire.types.request import Abort
from quire.types.step import StepPlan
from toy_decoding import ToyGrammars


def leased(step: InFlightStep) -> set[tuple[int, int]]:
    """The rows that a step computes or samples, with their leases."""
    return {*zip(step.rows.tolist(), step.leases.tolist(), strict=True), *step.other_leases.items()}


class Watched(Harness):
    """Asserts before every wait that no row is in two of the steps in flight, and counts these."""

    def __init__(self, micro_batches: int, **settings: Any) -> None:
        super().__init__(depth=micro_batches, micro_batches=micro_batches, **settings)
        self.depths: list[int] = []
        pipeline = self.core._pipeline
        collect = pipeline.collect

        def watch() -> Any:
            steps = list(pipeline._steps)
            self.depths.append(len(steps))
            seen: set[tuple[int, int]] = set()
            for step in steps:
                assert seen.isdisjoint(leased(step))
                seen |= leased(step)
            assert len({step.micro_batch for step in steps}) == len(steps)
            return collect()

        pipeline.collect = watch  # type: ignore[method-assign]


def rows_of(plan: StepPlan) -> set[int]:
    chunks = {row for chunk in plan.chunks for row in (chunk.row, *chunk.sample_rows)}
    return {*plan.decode_rows.tolist(), *chunks}


class StageClock:
    """The time of a pipeline whose stages take a second for each token. A stage begins a plan when it has done the one
    before and the stage before has done this one, and the first stage when the tokens of its rows have come."""

    def __init__(self, harness: Harness, num_stages: int) -> None:
        self.now = 0.0
        self.busy = [0.0] * num_stages
        self._free = [0.0] * num_stages
        self._sampled: dict[int, float] = {}  # by row, when its last token came
        self._ends: deque[float] = deque()
        self._launch, self._collect = harness.executor.launch, harness.executor.collect
        harness.executor.launch, harness.executor.collect = self.launch, self.collect  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> None:
        ready = max([self.now, *(self._sampled.get(row, 0.0) for row in rows_of(plan))])
        for stage in range(len(self.busy)):
            ready = self._free[stage] = max(ready, self._free[stage]) + plan.num_tokens
            self.busy[stage] += plan.num_tokens
        self._sampled |= dict.fromkeys(rows_of(plan), ready)
        self._ends.append(ready)
        self._launch(plan)

    def collect(self) -> Any:
        self.now = max(self.now, self._ends.popleft())
        return self._collect()


def prompts(count: int) -> Iterator[tuple[str, list[int]]]:
    for number in range(count):
        yield f"r{number}", [5 + number, 9, 2, 7 + number % 3]


def answers(harness: Harness, count: int, **params: Any) -> list[list[int]]:
    for name, prompt in prompts(count):
        harness.submit(name, prompt, **params)
    harness.run()
    return [harness.answer(name) for name, _ in prompts(count)]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_plans_in_flight_have_no_row_in_common_and_tokens_are_those_of_one_micro_batch(micro_batches: int) -> None:
    one = answers(Harness(num_blocks=200), 8, max_tokens=30)
    watched = Watched(micro_batches, num_blocks=200)
    assert answers(watched, 8, max_tokens=30) == one
    assert watched.depths.count(micro_batches) > 20  # every one has a plan in flight
    assert max(watched.depths) == micro_batches


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_all_stages_of_a_pipeline_are_busy(num_stages: int) -> None:
    """With one micro-batch, one stage works at a time; with as many as stages, all do."""
    seconds, shares = [], []
    for micro_batches in (1, num_stages):
        harness = Watched(micro_batches, num_blocks=400, max_num_seqs=12)
        clock = StageClock(harness, num_stages)
        answers(harness, 12, max_tokens=64)
        seconds.append(clock.now)
        shares.append(min(clock.busy) / clock.now)
    assert shares[0] == pytest.approx(1 / num_stages, rel=0.02)
    assert shares[1] > 0.95
    assert seconds[0] / seconds[1] > 0.95 * num_stages


def test_new_groups_go_to_the_micro_batch_with_the_fewest_rows() -> None:
    harness = Watched(2)
    for number, expected in enumerate([(1, 0), (1, 1), (2, 1), (2, 2)]):
        harness.submit(f"r{number}", [5 + number, 9, 2], max_tokens=50)
        for _ in range(3):
            harness.step()
        batches = [group.micro_batch for group in harness.core.running]
        assert sorted((batches.count(0), batches.count(1)), reverse=True) == list(expected)
    harness.core.abort(Abort("r0"))
    harness.core.abort(Abort("r2"))
    for number in (4, 5):  # they take the places of both
        harness.submit(f"r{number}", [5 + number, 9, 2], max_tokens=50)
        for _ in range(3):
            harness.step()
    batches = [group.micro_batch for group in harness.core.running]
    assert batches.count(0) == batches.count(1) == 2
    harness.run()


def test_many_requests_at_once_are_divided_in_the_first_plans() -> None:
    harness = Watched(2, num_blocks=200)
    for name, prompt in prompts(8):
        harness.submit(name, prompt, max_tokens=20)
    harness.step()
    assert [len(plan.new_rows) for plan in harness.executor.plans[:2]] == [4, 4]
    harness.run()


def test_a_micro_batch_with_nothing_to_do_is_skipped() -> None:
    harness = Watched(3)
    harness.submit("alone", [5, 9, 2], max_tokens=10)
    harness.run()
    assert harness.depths == [1] * len(harness.depths)
    assert len(harness.executor.plans) == 10
    assert all(plan.num_tokens for plan in harness.executor.plans)


def test_a_prefix_that_one_micro_batch_computes_is_read_by_the_next_plan_of_another() -> None:
    harness, shared = Watched(2, num_blocks=200), list(range(3, 27))
    harness.submit("first", [*shared, 30], max_tokens=12)
    harness.submit("second", [*shared, 31], max_tokens=12)
    for _ in range(2):
        harness.step()
    assert {group.micro_batch for group in harness.core.running} == {0, 1}
    harness.run()
    cached = [harness.finished[name].num_cached_tokens for name in ("first", "second")]
    assert sorted(cached) == [0, len(shared)]
    one = Harness(num_blocks=200)
    one.submit("first", [*shared, 30], max_tokens=12)
    one.submit("second", [*shared, 31], max_tokens=12)
    one.run()
    assert [harness.answer(name) for name in ("first", "second")] == [one.answer(name) for name in ("first", "second")]


def test_grammars_of_one_micro_batch_do_not_wait_for_the_results_of_another() -> None:
    harness = Watched(2, num_blocks=200, tools=DecodingTools(ToyGrammars(), vocabulary=lambda: VOCABULARY))
    for number in range(4):
        harness.submit(f"r{number}", [5 + number, 9], grammar="json", max_tokens=24, temperature=1.0, seed=number)
    harness.run()
    assert any(plan.guided for plan in harness.executor.plans)
    assert harness.depths.count(2) > len(harness.depths) / 2


def test_beams_stay_in_one_micro_batch() -> None:
    harness = Watched(2, num_blocks=200)
    harness.submit("search", [5, 9, 2], beam=BeamRules(3), n=3, max_tokens=10)
    harness.submit("other", [6, 9, 2], max_tokens=20)
    harness.run()
    one = Harness(num_blocks=200)
    one.submit("search", [5, 9, 2], beam=BeamRules(3), n=3, max_tokens=10)
    one.run()
    found = [[sample.token_ids for sample in made.finished["search"].samples] for made in (harness, one)]
    assert found[0] == found[1]
    together = [plan for plan in harness.executor.plans if len(rows_of(plan)) == 3]
    assert len(together) >= 8


def test_too_few_steps_in_flight_for_the_micro_batches_are_refused() -> None:
    harness = Harness(micro_batches=2, depth=2)
    with pytest.raises(ValueError, match="depth must be at least 2"):
        Pipeline(harness.executor, 1, micro_batches=2)
