"""Ranks of which one misbehaves in steps of certain numbers, in place of quire.runtime.executor.rank_main."""

from __future__ import annotations

import sys

from quire.runtime.executor import rank_main
from quire.runtime.executor.single import SingleExecutor
from quire.types.step import StepPlan

LOOPS, RAISES = 1_003, 1_004  # numbers of steps
_launch = SingleExecutor.launch


def launch(self: SingleExecutor, plan: StepPlan) -> None:
    if self.ranks.place.rank == 1:
        while plan.step == LOOPS:
            pass
        if plan.step == RAISES:
            raise RuntimeError("the weights are\nwrong")
    _launch(self, plan)


if __name__ == "__main__":
    SingleExecutor.launch = launch  # type: ignore[method-assign]
    rank_main.main(sys.argv[1:])
