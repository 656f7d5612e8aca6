"""Ranks of which one misbehaves, in steps of certain numbers or while it loads. Tests start this program in place of
quire.runtime.executor.rank_main."""

from __future__ import annotations

import sys
import threading
from typing import Any

from quire.kernels.native.program_run import Program
from quire.runtime.executor import rank_main
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.files import ModelFiles
from quire.types.step import StepPlan

LOOPS, RAISES, LOOPS_INSIDE, SLEEPS, SLEEPS_INSIDE = 1_003, 1_004, 1_005, 1_006, 1_007  # numbers of steps
HANGS = "hangs"  # the name of a model that a rank never loads
_init, _launch, _run = SingleExecutor.__init__, SingleExecutor.launch, Program.run
_looping: list[bool] = []
_never = threading.Event()


def init(self: SingleExecutor, files: ModelFiles, *arguments: Any, **options: Any) -> None:
    if files.name == HANGS and options["ranks"].place.rank == 1:
        options["progress"](HANGS, 0, 1)
        _never.wait()
    _init(self, files, *arguments, **options)


def launch(self: SingleExecutor, plan: StepPlan) -> None:
    if self.ranks.place.rank == 1:
        while plan.step == LOOPS:
            pass
        if plan.step == RAISES:
            raise RuntimeError("the weights are\nwrong")
        if plan.step == SLEEPS:
            _never.wait()
        if plan.step in (LOOPS_INSIDE, SLEEPS_INSIDE):
            _looping.append(plan.step == LOOPS_INSIDE)
    _launch(self, plan)


def run(self: Program, *arguments: Any) -> Any:
    """Of a compiled program, within which the other rank waits then."""
    while _looping:
        if not _looping[0]:
            _never.wait()
    return _run(self, *arguments)


if __name__ == "__main__":
    SingleExecutor.__init__ = init  # type: ignore[method-assign]
    SingleExecutor.launch = launch  # type: ignore[method-assign]
    Program.run = run  # type: ignore[method-assign]
    rank_main.main(sys.argv[1:])
