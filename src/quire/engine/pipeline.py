"""Keeps steps in flight, so that the device never waits for Python.

Planning needs counts, not token values, so step N+1 is planned and launched while N runs. What the counts could not
foresee (a stop token, an abort, a preemption) shows when the result arrives: the lease noted here is then no longer
the row's, and the result is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.executor import Executor
from quire.types.step import Ints, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step and the leases its rows had when it was planned, at that version of the row book."""

    plan: StepPlan
    rows: Ints  # [sampled], the order of StepResult.token_ids
    leases: npt.NDArray[np.int64]  # [sampled]
    version: int
    other_leases: dict[int, int]  # rows with a chunk or new in this step -> lease
    launched: float  # seconds, on the engine's clock

    def lease_of(self, row: int) -> int | None:
        """The lease a row had in this step; None when the step had nothing to do with it."""
        if row in self.other_leases:
            return self.other_leases[row]
        (places,) = np.nonzero(self.rows == row)
        return int(self.leases[places[0]]) if len(places) else None


class Pipeline:
    """Up to `depth` launched steps in front of an Executor, collected in order."""

    def __init__(self, executor: Executor, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._executor, self._depth = executor, depth
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def fill(self, prepare: Callable[[], Flight | None]) -> None:
        """Launch planned steps until the pipeline is full or there is nothing to plan."""
        while len(self._flights) < self._depth and (flight := prepare()) is not None:
            self._flights.append(flight)
            self._executor.launch(flight.plan)

    def collect(self) -> tuple[Flight, StepResult]:
        """Wait for the oldest step."""
        result = self._executor.collect()
        flight = self._flights.popleft()
        if result.step != flight.plan.step or len(result.token_ids) != len(flight.rows):
            answer = f"step {result.step} with {len(result.token_ids)} tokens"
            raise RuntimeError(f"step {flight.plan.step} of {len(flight.rows)} rows was answered by {answer}")
        return flight, result

    def clear(self) -> None:
        self._flights.clear()
