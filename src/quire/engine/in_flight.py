"""Keeps several steps in flight (asynchronous scheduling), so that the device does not wait for Python.

Planning needs counts of tokens, not their values, so step N+1 is planned and launched while step N runs. If the
sequence of a row ends, is aborted or is preempted meanwhile, the row loses its lease, and its result is dropped when it
comes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.group import Sequence, SequenceState
from quire.engine.executor import Executor
from quire.engine.scheduler.row_table import RowTable
from quire.types.step import Ints, Masks, StepPlan, StepResult

_AWAITING = SequenceState.AWAITING  # a member of an Enum is slow to look up
_LEAD_SECONDS, _LEAD_SHARE = 0.8e-3, 0.15  # plan the next step at least this long before the end of the current one
_DRIFT = 1.02  # factor by which the expected duration may grow with each step
_SIZE_STEP = 8  # rows per size class of decode steps


@dataclass(frozen=True, slots=True)
class AwaitedSamples:
    """The samples of a paced row in a step: `count` samples from `place` on, and the lease of the row."""

    row: int
    lease: int
    place: int
    count: int


@dataclass(slots=True)
class InFlightStep:
    """A launched step, with the leases of its rows and the version of the row table when it was planned.

    `rows` are the rows that run ahead and sample; `paced` are the other samples. A guided step samples only after its
    masks are supplied.
    """

    plan: StepPlan
    rows: Ints  # [samples of rows that run ahead]
    leases: npt.NDArray[np.int64]  # [rows]
    version: int
    other_leases: dict[int, int]  # rows with a chunk, new or paced in this step -> lease
    launched: float  # seconds, on the engine's clock
    places: npt.NDArray[np.intp] | None = None  # [rows], their indices in StepResult.token_ids; None: 0, 1, 2 ...
    paced: tuple[AwaitedSamples, ...] = ()
    masks: Masks | None = None  # of a guided step: the masks that were known when it was planned
    awaits_masks: bool = False
    micro_batch: int = 0
    num_tokens: int = 0  # that it computes

    @property
    def num_samples(self) -> int:
        ahead = len(self.rows)
        return ahead + sum(awaited.count for awaited in self.paced) if self.paced else ahead

    @property
    def is_mostly_paced(self) -> bool:
        """Whether most of the rows are paced, in a step without prompts. The next step then waits for this one's
        result: without the paced rows it would cost as much and generate less."""
        paced = self.paced
        return bool(paced) and len(paced) > len(self.rows) and self.num_samples == self.plan.num_tokens

    def lease_of(self, row: int) -> int | None:
        """Return the lease that a row had in this step; None if the row was not in it."""
        if row in self.other_leases:
            return self.other_leases[row]
        (found,) = np.nonzero(self.rows == row)
        return int(self.leases[found[0]]) if len(found) else None


class Pipeline:
    """Launches steps on an Executor, keeps up to `depth` of them in flight, and collects their results in order. Each
    micro-batch may have `most_ahead` of them in flight: one, if `depth` equals the number of micro-batches."""

    def __init__(
        self,
        executor: Executor,
        depth: int | None,  # None: the executor's depth
        clock: Callable[[], float] = time.monotonic,
        micro_batches: int = 1,
    ) -> None:
        depth = depth or max(executor.depth, micro_batches)
        if depth < micro_batches:
            raise ValueError(f"depth must be at least {micro_batches}, got {depth}")
        self._micro_batches = micro_batches
        self._executor, self.depth, self._clock = executor, depth, clock
        self._steps: deque[InFlightStep] = deque()
        self._collected = 0.0  # when the last result was collected
        self._durations: dict[int, float] = {}  # the shortest recent duration of decode steps, by size class

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def guided_step(self) -> InFlightStep | None:
        """The guided step whose masks can be computed now, because the results of all earlier steps of its micro-batch
        have come."""
        if not self._steps or not (last := self._steps[-1]).awaits_masks:
            return None
        before = len(self._steps) - 1 if self._micro_batches == 1 else self._num_steps(last.micro_batch) - 1
        return last if before == 0 else None

    @property
    def most_ahead(self) -> int:
        """How many steps of one micro-batch may be in flight."""
        return self.depth // self._micro_batches

    @property
    def busy(self) -> Collection[int]:
        """The micro-batches that have `most_ahead` steps in flight."""
        if self._micro_batches == 1:
            return ()
        return [number for number in range(self._micro_batches) if self._num_steps(number) >= self.most_ahead]

    def _num_steps(self, micro_batch: int) -> int:
        return sum([step.micro_batch == micro_batch for step in self._steps])

    def fill(self, prepare: Callable[[], InFlightStep | None], supply: Callable[[InFlightStep], Masks | None]) -> None:
        """Plan and launch steps until `depth` are in flight, there is nothing to plan, the last one awaits its masks,
        or most of its rows wait for their results. `supply` returns the masks of a guided step."""
        while True:
            if (step := self.guided_step) is not None:
                self._executor.supply_masks(supply(step))
                step.awaits_masks = False
            if len(self._steps) == self.depth or (self._steps and self._is_last(self._steps[-1])):
                return
            if (step := prepare()) is None:
                return
            self._steps.append(step)
            self._executor.launch(step.plan)

    def _is_last(self, step: InFlightStep) -> bool:
        """Whether the next step must wait for this step's result or masks."""
        return step.awaits_masks or (self._micro_batches == 1 and step.is_mostly_paced)

    def collect(self) -> tuple[InFlightStep, StepResult]:
        """Wait for the oldest step in flight. Returns it and its result."""
        result = self._executor.collect()
        step = self._steps.popleft()
        self._note_duration(step)
        if result.step != step.plan.step or len(result.token_ids) != step.num_samples:
            answer = f"step {result.step} with {len(result.token_ids)} tokens"
            raise RuntimeError(f"step {step.plan.step} of {step.num_samples} samples got the result of {answer}")
        return step, result

    def slack_seconds(self) -> float:
        """Seconds the caller may wait before the next step must be planned, while the step in flight keeps the device
        busy. A request that comes within that time gets into the next step. 0 if unknown."""
        if len(self._steps) != 1 or self.depth == 1 or self._micro_batches > 1 or self._steps[0].awaits_masks:
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
            taken = now - (step.launched if step.launched > before else before)
            most = _DRIFT * self._durations.get(size, taken)
            self._durations[size] = taken if taken < most else most


def _decode_size(step: InFlightStep) -> int | None:
    """Return the size class of a decode step; None for a step that also computes chunks. Steps of one class take about
    the same time."""
    return None if step.plan.chunks else -(-len(step.plan.decode_rows) // _SIZE_STEP)


def find_awaited(
    plan: StepPlan, num_ahead: int, table: RowTable
) -> tuple[tuple[AwaitedSamples, ...], list[int], npt.NDArray[np.intp] | None]:
    """Sort the samples of a plan. Returns the samples of paced rows, the rows of chunks that run ahead, and the indices
    of the samples of all rows that run ahead (None if there are no paced rows).

    The first `num_ahead` samples are those of decoding rows that run ahead.
    """
    if num_ahead == len(plan.decode_rows):
        sampled = [row for chunk in plan.chunks for row in chunk.sample_rows]
        sequences = [table.sequences[row] for row in sampled]
        if not [each for each in sequences if each is not None and each.state is _AWAITING]:  # as usual
            return (), sampled, None
    samples = [(row, 1) for row in plan.decode_rows[num_ahead:].tolist()]
    samples += [(row, chunk.num_sampled) for chunk in plan.chunks for row in chunk.sample_rows]
    paced: list[AwaitedSamples] = []
    ahead: list[int] = []
    places: list[int] = []
    place = num_ahead
    for row, count in samples:
        if _awaits(table.sequences[row]):
            paced.append(AwaitedSamples(row, table.lease_of[row], place, count))
        else:
            ahead.append(row)
            places.append(place)
        place += count
    if not paced:
        return (), ahead, None
    return tuple(paced), ahead, np.concatenate([np.arange(num_ahead), np.array(places, dtype=np.intp)])


def _awaits(sequence: Sequence | None) -> bool:
    """Whether a sequence is paced and in a step."""
    return sequence is not None and sequence.state is _AWAITING
