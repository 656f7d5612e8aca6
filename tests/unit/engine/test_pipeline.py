"""When the next step has to be planned."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from quire.engine.pipeline import Flight, Pipeline
from quire.types.step import Chunk, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport


class Device:
    """Takes `seconds` for every step; `collect` moves the clock to its end."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.free_at = 0.0, seconds, 0.0
        self.ends: deque[tuple[int, int, float]] = deque()
        self.depth = 2

    def launch(self, plan: StepPlan) -> None:
        self.free_at = max(self.now, self.free_at) + self.seconds
        self.ends.append((plan.step, len(plan.decode_rows), self.free_at))

    def collect(self) -> StepResult:
        step, rows, end = self.ends.popleft()
        self.now = max(self.now, end)
        return StepResult(step, np.zeros(rows, dtype=np.int32))

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED

    def close(self) -> None: ...


def flight(step: int, device: Device, rows: int = 4, chunks: tuple[Chunk, ...] = ()) -> Flight:
    plan = StepPlan(step, np.arange(rows, dtype=np.int32), chunks)
    return Flight(plan, plan.sample_rows, np.zeros(rows, dtype=np.int64), 0, {}, device.now)


def run(pipeline: Pipeline, device: Device, steps: range, **kind: object) -> None:
    """Fill and collect, as the engine does."""
    for step in steps:
        waiting = [flight(step, device, **kind)]  # type: ignore[arg-type]
        pipeline.fill(lambda waiting=waiting: waiting.pop() if waiting else None)  # type: ignore[misc]
        if len(pipeline) == 2:
            pipeline.collect()


def test_a_step_like_those_before_leaves_leisure_until_shortly_before_its_end() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 2, lambda: device.now)
    run(pipeline, device, range(6))
    assert pipeline.leisure() == pytest.approx(0.010 - 0.0015, abs=1e-4)
    device.now += 0.008
    assert pipeline.leisure() == pytest.approx(0.0005, abs=1e-4)
    device.now += 0.008
    assert pipeline.leisure() == 0.0


def test_nothing_is_foreseen_of_a_size_or_a_kind_that_was_not_seen() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 2, lambda: device.now)
    assert pipeline.leisure() == 0.0
    run(pipeline, device, range(1))
    assert pipeline.leisure() == 0.0
    run(pipeline, device, range(1, 6))
    pipeline.collect()
    run(pipeline, device, range(6, 7), rows=40)
    assert pipeline.leisure() == 0.0
    pipeline.collect()
    run(pipeline, device, range(7, 8), rows=0, chunks=(Chunk(0, 0, 5),))
    assert pipeline.leisure() == 0.0


def test_at_depth_one_there_is_no_leisure() -> None:
    device = Device(0.010)
    pipeline = Pipeline(device, 1, lambda: device.now)
    for step in range(4):
        waiting = [flight(step, device)]
        pipeline.fill(lambda waiting=waiting: waiting.pop() if waiting else None)  # type: ignore[misc]
        assert pipeline.leisure() == 0.0
        pipeline.collect()


def test_a_launch_that_came_late_does_not_make_steps_look_longer() -> None:
    device = Device(0.004)
    pipeline = Pipeline(device, 2, lambda: device.now)
    run(pipeline, device, range(4))
    for step in range(4, 12):
        device.now += 0.050  # the host was away
        run(pipeline, device, range(step, step + 1))
        assert pipeline.leisure() <= 0.004
