"""When the next step has to be planned, and what a step in flight waits for."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from quire.engine.in_flight import AwaitedSamples, InFlightStep, Pipeline
from quire.types.step import Chunk, Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport


class Device:
    """Takes `seconds` for every step; `collect` moves the clock to its end."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.free_at = 0.0, seconds, 0.0
        self.ends: deque[tuple[int, int, float]] = deque()
        self.depth = 2
        self.supplied: list[Masks | None] = []

    def launch(self, plan: StepPlan) -> None:
        self.free_at = max(self.now, self.free_at) + self.seconds
        self.ends.append((plan.step, len(plan.decode_rows), self.free_at))

    def supply_masks(self, masks: Masks | None) -> None:
        self.supplied.append(masks)

    def collect(self) -> StepResult:
        step, rows, end = self.ends.popleft()
        self.now = max(self.now, end)
        return StepResult(step, np.zeros(rows, dtype=np.int32))

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED

    def close(self) -> None: ...


def in_flight(step: int, device: Device, rows: int = 4, chunks: tuple[Chunk, ...] = ()) -> InFlightStep:
    plan = StepPlan(step, np.arange(rows, dtype=np.int32), chunks)
    return InFlightStep(plan, plan.sample_rows, np.zeros(rows, dtype=np.int64), 0, {}, device.now)


def no_masks(step: InFlightStep) -> Masks | None:
    raise AssertionError(f"step {step.plan.step} awaits no masks")


def run(pipeline: Pipeline, device: Device, steps: range, **kind: object) -> None:
    """Fill and collect, as the engine does."""
    for step in steps:
        waiting = [in_flight(step, device, **kind)]  # type: ignore[arg-type]
        pipeline.fill(lambda waiting=waiting: waiting.pop() if waiting else None, no_masks)  # type: ignore[misc]
        if len(pipeline) == 2:
            pipeline.collect()


def test_a_step_like_those_before_leaves_slack_until_shortly_before_its_end() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 2, lambda: device.now)
    run(pipeline, device, range(6))
    assert pipeline.slack_seconds() == pytest.approx(0.010 - 0.0015, abs=1e-4)
    device.now += 0.008
    assert pipeline.slack_seconds() == pytest.approx(0.0005, abs=1e-4)
    device.now += 0.008
    assert pipeline.slack_seconds() == 0.0


def test_nothing_is_foreseen_of_a_size_or_a_kind_that_was_not_seen() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 2, lambda: device.now)
    assert pipeline.slack_seconds() == 0.0
    run(pipeline, device, range(1))
    assert pipeline.slack_seconds() == 0.0
    run(pipeline, device, range(1, 6))
    pipeline.collect()
    run(pipeline, device, range(6, 7), rows=40)
    assert pipeline.slack_seconds() == 0.0
    pipeline.collect()
    run(pipeline, device, range(7, 8), rows=0, chunks=(Chunk(0, 0, 5),))
    assert pipeline.slack_seconds() == 0.0


def test_at_depth_one_there_is_no_slack() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 1, lambda: device.now)
    for step in range(4):
        waiting = [in_flight(step, device)]
        pipeline.fill(lambda waiting=waiting: waiting.pop() if waiting else None, no_masks)  # type: ignore[misc]
        assert pipeline.slack_seconds() == 0.0
        pipeline.collect()


def test_a_launch_that_came_late_does_not_make_steps_look_longer() -> None:
    device = Device(0.004)
    pipeline = Pipeline(device, 2, lambda: device.now)
    run(pipeline, device, range(4))
    for step in range(4, 12):
        device.now += 0.050  # the host was away
        run(pipeline, device, range(step, step + 1))
        assert pipeline.slack_seconds() <= 0.004


def guided(step: int, device: Device) -> InFlightStep:
    made = in_flight(step, device)
    made.awaits_masks = True
    return made


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_masks_of_a_guided_step_are_supplied_when_all_results_before_it_have_come(depth: int) -> None:
    device, asked = Device(0.010), list[tuple[int, int]]()
    pipeline = Pipeline(device, depth, lambda: device.now)
    kinds = [in_flight, guided, guided, in_flight, in_flight, guided]
    waiting = [kind(step, device) for step, kind in enumerate(kinds)]

    def supply(step: InFlightStep) -> Masks | None:
        asked.append((step.plan.step, len(collected)))
        return None

    collected: list[int] = []
    while waiting or len(pipeline):
        pipeline.fill(lambda: waiting.pop(0) if waiting else None, supply)
        step, _ = pipeline.collect()
        assert not step.awaits_masks
        collected.append(step.plan.step)
    assert collected == [0, 1, 2, 3, 4, 5]
    assert asked == [(1, 1), (2, 2), (5, 5)]  # each once, after the results of all steps before it
    assert device.supplied == [None] * 3


def test_nothing_is_launched_behind_a_step_that_awaits_its_masks() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 3, lambda: device.now)
    waiting = [in_flight(0, device), guided(1, device), in_flight(2, device)]
    pipeline.fill(lambda: waiting.pop(0) if waiting else None, no_masks)
    assert (len(pipeline), len(waiting)) == (2, 1)
    assert pipeline.guided_step is None
    pipeline.collect()
    assert pipeline.guided_step is not None
    assert pipeline.slack_seconds() == 0.0  # its masks come first
    pipeline.fill(lambda: waiting.pop(0) if waiting else None, lambda step: None)
    assert (len(pipeline), len(waiting)) == (2, 0)


def test_an_answer_to_another_step_or_with_too_few_tokens_is_an_error() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 1, lambda: device.now)
    waiting = [in_flight(4, device)]
    pipeline.fill(lambda: waiting.pop() if waiting else None, no_masks)
    device.ends[0] = (4, 3, 0.010)
    with pytest.raises(RuntimeError, match="step 4 of 4 samples got the result of step 4 with 3 tokens"):
        pipeline.collect()


def test_a_step_knows_the_leases_its_rows_had() -> None:
    rows, leases = np.array([3, 1], dtype=np.int32), np.array([30, 10], dtype=np.int64)
    step = InFlightStep(StepPlan(0, rows), rows, leases, 0, {2: 20}, 0.0)
    assert [step.lease_of(row) for row in range(4)] == [None, 10, 20, 30]


@pytest.mark.parametrize(
    ("ahead", "paced", "chunks", "launched"),
    [
        (0, 2, (), 1),
        (1, 2, (), 1),
        (2, 2, (), 2),  # as many run ahead: they do not wait for the others
        (0, 2, (Chunk(9, 0, 8),), 2),  # prompts are read meanwhile
    ],
)
def test_no_step_is_launched_while_most_rows_wait_for_their_results(
    ahead: int, paced: int, chunks: tuple[Chunk, ...], launched: int
) -> None:
    device = Device(1.0)
    pipeline = Pipeline(device, None, lambda: device.now)  # type: ignore[arg-type]

    def prepare() -> InFlightStep:
        step = in_flight(len(device.ends), device, ahead + paced, chunks)
        step.rows = step.rows[:ahead]
        step.paced = tuple(AwaitedSamples(ahead + place, 0, ahead + place, 1) for place in range(paced))
        return step

    pipeline.fill(prepare, no_masks)
    assert len(pipeline) == launched
    pipeline.collect()
    pipeline.fill(prepare, no_masks)
    assert len(pipeline) == launched
