"""The real engine over pretended answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar import Grammars
from quire.engine.decoding.group import Group
from quire.engine.decoding.lookahead_registry import make_lookaheads
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.pipeline import Flight
from quire.engine.recording.core import condition
from quire.engine.recording.plans import plan_record
from quire.engine.recording.rows import find_searches, find_seats
from quire.engine.recording.tokens import WIDE_VOCABULARY
from quire.simulator.executor import Prompter
from quire.simulator.recording import Setup
from quire.types.step import StepPlan, StepResult


class ReplayedCore(EngineCore):
    """An EngineCore that tells a prompter whose answers it will ask for."""

    def __init__(
        self,
        executor: Executor,
        setup: Setup,
        prompter: Prompter,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        grammars: Grammars,
        clock: Callable[[], float],
    ) -> None:
        tools = DecodingTools(grammars, make_lookaheads(setup.speculation, setup.depth))
        super().__init__(executor, cache, scheduler, WIDE_VOCABULARY, tools=tools, depth=setup.depth, clock=clock)
        self._prompter = prompter

    def _make_flight(self, plan: StepPlan) -> Flight:
        flight = super()._make_flight(plan)
        seats = find_seats(plan, self._scheduler.rows)
        self._prompter.expect(seats, find_searches(flight, self._scheduler.running) if flight.paced else ())
        return flight

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Blocks that are held, groups that run, groups that wait; preemptions and swaps so far."""
        return condition(self._scheduler)

    def group(self, request_id: str) -> Group | None:
        return self._groups.get(request_id)


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
