"""Keeps steps in flight, so that the device never waits for Python.

Planning needs counts, not token values, so step N+1 is planned and launched while N runs. What the counts could not
foresee (a stop token, an abort, a preemption) shows when the result arrives: the lease noted here is then no longer
the row's, and the result is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.group import SequenceState
from quire.engine.executor import Executor
from quire.engine.scheduler.row_table import RowTable
from quire.types.step import Ints, Masks, StepPlan, StepResult

_LEAD_SECONDS, _LEAD_SHARE = 0.8e-3, 0.15  # how long before the end of a step the next one is planned, at least
_DRIFT = 1.02  # a step may be expected to take so much longer than the last of its size
_SIZE_STEP = 8  # rows


@dataclass(frozen=True, slots=True)
class AwaitedSamples:
    """A paced row's samples in a step: `count` of them from `place` on, and the lease it had."""

    row: int
    lease: int
    place: int
    count: int


@dataclass(slots=True)
class InFlightStep:
    """A launched step and the leases its rows had when it was planned, at that version of the row table.

    `rows` are those that run ahead; the samples of `paced` rows are not among them. A guided step waits for its masks
    until they are supplied.
    """

    plan: StepPlan
    rows: Ints  # [samples of rows that run ahead]
    leases: npt.NDArray[np.int64]  # [rows]
    version: int
    other_leases: dict[int, int]  # rows with a chunk, new or paced in this step -> lease
    launched: float  # seconds, on the engine's clock
    places: npt.NDArray[np.intp] | None = None  # [rows], where in StepResult.token_ids; None: all of it, in order
    paced: tuple[AwaitedSamples, ...] = ()
    masks: Masks | None = None  # of a guided step: those that were known when it was planned
    awaits_masks: bool = False

    @property
    def num_samples(self) -> int:
        ahead = len(self.rows)
        return ahead + sum(awaited.count for awaited in self.paced) if self.paced else ahead

    def lease_of(self, row: int) -> int | None:
        """The lease a row had in this step; None when the step had nothing to do with it."""
        if row in self.other_leases:
            return self.other_leases[row]
        (found,) = np.nonzero(self.rows == row)
        return int(self.leases[found[0]]) if len(found) else None


class Pipeline:
    """Up to `depth` launched steps in front of an Executor, collected in order."""

    def __init__(self, executor: Executor, depth: int, clock: Callable[[], float] = time.monotonic) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._executor, self.depth, self._clock = executor, depth, clock
        self._steps: deque[InFlightStep] = deque()
        self._collected = 0.0  # when the step before the oldest in flight was done
        self._durations: dict[int, float] = {}  # the least that decode steps took lately, by size

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def guided_step(self) -> InFlightStep | None:
        """The step whose masks can be supplied now: it awaits them, and all results before it have come."""
        return self._steps[0] if len(self._steps) == 1 and self._steps[0].awaits_masks else None

    def fill(self, prepare: Callable[[], InFlightStep | None], supply: Callable[[InFlightStep], Masks | None]) -> None:
        """Launch planned steps until the pipeline is full, nothing is left to plan, or the last one awaits its
        masks."""
        while True:
            if (step := self.guided_step) is not None:
                self._executor.supply_masks(supply(step))
                step.awaits_masks = False
            if len(self._steps) == self.depth or (self._steps and self._steps[-1].awaits_masks):
                return
            if (step := prepare()) is None:
                return
            self._steps.append(step)
            self._executor.launch(step.plan)

    def collect(self) -> tuple[InFlightStep, StepResult]:
        """Wait for the oldest step."""
        result = self._executor.collect()
        step = self._steps.popleft()
        self._note_duration(step)
        if result.step != step.plan.step or len(result.token_ids) != step.num_samples:
            answer = f"step {result.step} with {len(result.token_ids)} tokens"
            raise RuntimeError(f"step {step.plan.step} of {step.num_samples} samples was answered by {answer}")
        return step, result

    def slack_seconds(self) -> float:
        """Seconds the caller may wait before the next step is planned, as the one in flight keeps the device busy. A
        request that comes within that time is in the next step, not in the one after it. 0 where that is unknown."""
        if len(self._steps) != 1 or self.depth == 1 or self._steps[0].awaits_masks:
            return 0.0
        if (size := _decode_size(self._steps[0])) is None:
            return 0.0
        duration = self._durations.get(size, 0.0)
        begun = max(self._steps[0].launched, self._collected)
        return max(0.0, begun + duration - max(_LEAD_SECONDS, _LEAD_SHARE * duration) - self._clock())

    def clear(self) -> None:
        self._steps.clear()

    def _note_duration(self, step: InFlightStep) -> None:
        now, before = self._clock(), self._collected
        self._collected = now
        if (size := _decode_size(step)) is not None:
            taken = now - max(step.launched, before)
            self._durations[size] = min(taken, _DRIFT * self._durations.get(size, taken))


def _decode_size(step: InFlightStep) -> int | None:
    """Decode steps of one size take about as long; None for steps that also compute chunks."""
    return None if step.plan.chunks else -(-len(step.plan.decode_rows) // _SIZE_STEP)


def find_awaited(
    plan: StepPlan, num_ahead: int, table: RowTable
) -> tuple[tuple[AwaitedSamples, ...], list[int], npt.NDArray[np.intp] | None]:
    """Which samples of a step paced rows wait for; which rows of its chunks run ahead; where the samples of all rows
    that run ahead are.

    The first `num_ahead` samples are of rows that run ahead. The places are None when nobody waits.
    """
    samples = [(row, 1) for row in plan.decode_rows[num_ahead:].tolist()] if num_ahead < len(plan.decode_rows) else []
    samples += [(row, chunk.num_sampled) for chunk in plan.chunks for row in chunk.sample_rows]
    paced: list[AwaitedSamples] = []
    ahead: list[int] = []
    places: list[int] = []
    place = num_ahead
    for row, count in samples:
        sequence = table.sequences[row]
        if sequence is not None and sequence.state is SequenceState.AWAITING:
            paced.append(AwaitedSamples(row, int(table.leases[row]), place, count))
        else:
            ahead.append(row)
            places.append(place)
        place += count
    if not paced:
        return (), ahead, None
    return tuple(paced), ahead, np.concatenate([np.arange(num_ahead), np.array(places, dtype=np.intp)])
