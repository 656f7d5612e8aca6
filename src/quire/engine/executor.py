"""The protocol the engine needs of a runtime. Nothing in `engine/` knows more of devices than this."""

from __future__ import annotations

from typing import Protocol

from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import TransferReport


class Executor(Protocol):
    """Runs plans strictly in the order they are launched; results are collected in the same order."""

    @property
    def depth(self) -> int:
        """How many launched steps may be uncollected before `launch` would gain nothing. 1 on a CPU."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step; of a guided plan, all that comes before sampling. May return before it has run.

        Raises EngineDead if the workers are gone.
        """

    def supply_masks(self, masks: Masks | None) -> None:
        """The masks of the last launched plan, which is guided: its sampling begins. None: no sample has a mask.

        Called exactly once for each guided plan, before the next `launch` and before the plan is collected. A sample
        that has no mask may choose any token.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. An exception here is fatal to the engine."""

    def transfers(self) -> TransferReport:
        """What has become of launched plans' transfers since it was last asked. Never waits."""

    def close(self) -> None:
        """Give back devices and processes. Idempotent."""
