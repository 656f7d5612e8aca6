"""The real engine over pretended answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar import Grammars
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.in_flight import InFlightStep
from quire.engine.observer import EngineObserver
from quire.engine.recording.plans import plan_record
from quire.engine.recording.rows import find_beams, find_owners
from quire.engine.recording.tokens import WIDE_VOCABULARY
from quire.engine.speculation.registry import make_proposers
from quire.simulator.executor import Prompter
from quire.simulator.recording import Setup
from quire.types.step import StepPlan, StepResult


class _Cue(EngineObserver):
    """Tells a prompter, before each step is launched, whose answers will be asked for."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self.core: EngineCore | None = None

    def planned(self, step: InFlightStep) -> None:
        assert self.core is not None
        seats = find_owners(step.plan, self.core.rows)
        self._prompter.expect(seats, find_beams(step, self.core.running) if step.paced else ())


def make_replayed_core(
    executor: Executor,
    setup: Setup,
    prompter: Prompter,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    grammars: Grammars,
    clock: Callable[[], float],
) -> EngineCore:
    """An EngineCore whose answers a prompter gives."""
    tools, cue = DecodingTools(grammars, make_proposers(setup.speculation, setup.depth)), _Cue(prompter)
    core = cue.core = EngineCore(
        executor, cache, scheduler, WIDE_VOCABULARY, tools=tools, depth=setup.depth, clock=clock, observer=cue
    )
    return core


class Watch:
    """Answers as a prompter does, and keeps a record of every plan until it is asked for."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._records: list[dict[str, Any]] = []

    def __call__(self, plan: StepPlan) -> StepResult:
        result = self._prompter(plan)
        self._records.append(plan_record(plan, self._prompter.rows))
        return result

    def take(self) -> list[dict[str, Any]]:
        records, self._records = self._records, []
        return records


def sizes(plans: list[dict[str, Any]]) -> tuple[int, int]:
    """Prompt tokens and decode rows of some plans."""
    return sum(chunk[3] for plan in plans for chunk in plan.get("chunks", ())), sum(plan["decode"] for plan in plans)
