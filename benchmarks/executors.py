"""Executors without a model, for benchmarks of the control plane: they answer at once. LedgerExecutor also tracks what
plans give to each row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport


@dataclass(slots=True)
class StepClock:
    """The clock for the engine's own time: wall time, or the CPU time of the thread."""

    now_ns: Callable[[], int] = time.perf_counter_ns


CLOCK = StepClock()


class InstantExecutor:
    """Answers every step with token 0, after `seconds`. `spent_ns` is the time spent in it, to be subtracted."""

    def __init__(self, depth: int = 1, seconds: float = 0.0) -> None:
        self.depth, self._seconds = depth, seconds
        self.spent_ns = 0
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def supply_masks(self, masks: Masks | None) -> None:
        """Do nothing: every answer is token 0."""

    def collect(self) -> StepResult:
        start = CLOCK.now_ns()
        plan = self._plans.popleft()
        if self._seconds:
            time.sleep(self._seconds)
        result = StepResult(plan.step, np.zeros(len(plan.sample_rows), dtype=np.int32))
        self.spent_ns += CLOCK.now_ns() - start
        return result

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        raise InvalidRequest("adapter", f"{name} ({folder}) cannot be read: there are no weights")

    def forget_adapter(self, digest: str) -> None:
        """Do nothing: no adapter is kept."""

    def close(self) -> None:
        self._plans.clear()


@dataclass(slots=True)
class Held:
    """What one row holds: tokens written, blocks granted, and the number of tokens at its end."""

    written: int
    blocks: int
    final: int


class LedgerExecutor(InstantExecutor):
    """Tracks, from the plans alone, what every row holds while a step runs.

    It does not use the engine's own accounts. Rows must not share blocks (n = 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Held] = {}
        self.steps = 0
        self.written = self.blocks = 0  # over all rows, while the last launched step ran

    def launch(self, plan: StepPlan) -> None:
        self._seat(plan)
        for row in plan.grant_rows.tolist():
            self.rows[row].blocks += 1
        self.blocks += len(plan.grant_rows)
        for row in plan.decode_rows.tolist():
            self.rows[row].written += 1
        for chunk in plan.chunks:
            self.rows[chunk.row].written += chunk.num_tokens
        self.written += plan.num_tokens
        self.steps += 1
        super().launch(plan)

    def _seat(self, plan: StepPlan) -> None:
        for row in plan.released:
            left = self.rows.pop(row)
            self.written -= left.written
            self.blocks -= left.blocks
        if plan.copies:
            raise ValueError(f"step {plan.step} copies blocks; the ledger is for requests that share none")
        for new in plan.new_rows:
            final = new.num_prompt_tokens + (new.sampling.max_tokens or 0)
            self.rows[new.row] = Held(0, len(new.block_ids), final)
            self.blocks += len(new.block_ids)
