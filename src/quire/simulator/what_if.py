"""What would have happened: a recording's requests at their own times under another configuration.

Who sent a request only after an answer had come still sends it when it was recorded. A step takes what steps of its
size took; a sample says what it said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.config.tiers import TierConfig, check_tiers
from quire.engine.core import EngineCore
from quire.engine.recording.events import UnfinishedRequests
from quire.simulator.clock import VirtualClock
from quire.simulator.cost import Fit, fit_cost
from quire.simulator.engine import Watch, make_replayed_core, sizes
from quire.simulator.executor import Prompter, SimulatedExecutor
from quire.simulator.grammars import ScriptedGrammars
from quire.simulator.link import LinkCost, fit_link
from quire.simulator.recording import (
    Aborted,
    CacheReset,
    Event,
    Recording,
    RecordingError,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.simulator.run import Outcome, Run, StepRun
from quire.types.errors import InvalidRequest
from quire.types.output import TokensOut
from quire.types.request import Abort, Submit


@dataclass(frozen=True, slots=True)
class Scenario:
    """A recording with prices for its steps, to be run under any configuration."""

    recording: Recording
    fit: Fit
    link: LinkCost

    @classmethod
    def of(cls, recording: Recording) -> Scenario:
        reports = [report for step in recording.steps() for report in step.reports]
        return cls(recording, fit_cost(recording.step_sizes()), fit_link(reports))

    def run(self, name: str, cache: CacheConfig, scheduler: SchedulerConfig) -> Run:
        """Raises ConfigError for sections that do not go together, RecordingError if the engine stops.

        Policies that reserve memory share and move no blocks: under them there is no prefix cache and no tier.
        """
        if scheduler.policy in RESERVING:
            cache = replace(cache, enable_prefix_caching=False, tiers=TierConfig())
            scheduler = replace(scheduler, preemption="recompute")
        check_tiers(cache.tiers, scheduler.preemption, scheduler.policy, cache.layout)
        return _Play(self, Run(name, cache, scheduler)).play()


class _Input(NamedTuple):
    """Something that came in, and when the engine's next step began: an idle engine takes all of that step together."""

    event: Event
    step_at: float


@dataclass(slots=True)
class _Stop:
    """A sample that is ended for its text once it has so many tokens."""

    num_tokens: int
    abort: Abort


@dataclass(slots=True)
class _Play:
    scenario: Scenario
    run: Run
    clock: VirtualClock = field(default_factory=VirtualClock)
    live: UnfinishedRequests[Submitted] = field(default_factory=UnfinishedRequests)
    ids: dict[int, str] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)  # when grammars are compiled
    stops: dict[int, _Stop] = field(default_factory=dict)  # by sample handle
    heard: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # tokens, by sample handle
    watch: Watch = field(init=False)
    executor: SimulatedExecutor = field(init=False)
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        recording, run = self.scenario.recording, self.run
        setup, answers = recording.setup, recording.answers
        prompter = Prompter(answers, run.scheduler.num_rows)
        self.watch = Watch(prompter)
        cost, link = self.scenario.fit.cost, self.scenario.link
        found = tuple(file for step in recording.steps() for report in step.reports for file in report.found)
        files = found if run.cache.tiers.disk_path else ()
        self.executor = SimulatedExecutor(self.clock, cost, self.watch, setup.depth, link, files)
        self.core = make_replayed_core(
            self.executor,
            setup,
            prompter,
            cache=run.cache,
            scheduler=run.scheduler,
            grammars=ScriptedGrammars(answers.scripts, setup.vocab_size, self._is_ready, self._wait),
            clock=self.clock,
        )
        for step in recording.steps():
            self.ready_at |= dict.fromkeys(step.compiled, step.at)

    def _is_ready(self, ordinal: int) -> bool:
        return self.clock.now >= self.ready_at.get(ordinal, 0.0)

    def _wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def play(self) -> Run:
        events = self.scenario.recording.events
        texts = {(e.ordinal, e.index): e.num_tokens for e in events if isinstance(e, Aborted) and e.stop}
        inputs, core = deque(_inputs(events)), self.core
        while inputs or core.has_work:
            now = self.clock.now if core.has_work else max(self.clock.now, inputs[0].step_at)
            while inputs and inputs[0].event.at <= now:
                event = inputs.popleft().event
                self.clock.move_to(event.at)
                self._take(event, texts)
            self.clock.move_to(now)
            if core.has_work:
                self._step()
        core.check()
        self.run.outcomes.sort(key=lambda outcome: outcome.ordinal)
        return self.run

    def _take(self, event: Event, texts: dict[tuple[int, int | None], int]) -> None:
        if isinstance(event, Submitted):
            self._submit(event, texts)
        elif isinstance(event, Aborted) and event.ordinal in self.ids:
            self.core.abort(Abort(self.ids[event.ordinal], event.index))
        elif isinstance(event, CacheReset):
            self.core.reset_cache()
        elif isinstance(event, Unpinned):
            self.core.unpin(event.salt, event.name)

    def _submit(self, event: Submitted, texts: dict[tuple[int, int | None], int]) -> None:
        request = self._fit(event.request)
        self.live.add(request.request_id, event)
        self.ids[event.ordinal] = request.request_id
        try:
            handle = self._let_in(request)
        except InvalidRequest as error:
            self.live.refuse(request.request_id)
            del self.ids[event.ordinal]
            self.run.outcomes.append(Outcome(event.ordinal, request, event.at, refused=str(error)))
            return
        for index in range(request.sampling.n):
            count = texts.get((event.ordinal, index), texts.get((event.ordinal, None)))
            if count is not None:
                self.stops[handle + index] = _Stop(count, Abort(request.request_id, index, "stop"))

    def _fit(self, request: Submit) -> Submit:
        """A priority is refused where nobody reads it."""
        return request if self.run.scheduler.policy == "priority" else replace(request, priority=0)

    def _let_in(self, request: Submit) -> int:
        """A branch off what is not there yet begins by itself."""
        if request.source is None:
            return self.core.submit(request)
        try:
            return self.core.submit(request)
        except InvalidRequest as error:
            if error.field != "source":
                raise
            return self.core.submit(replace(request, source=None))

    def _step(self) -> None:
        start = self.clock.now
        out = self.core.step()
        if self.core.dead is not None:
            raise RecordingError(f"under {self.run.name} {self.core.dead}")
        plans = self.watch.take()
        if not plans and self.clock.now == start and (moment := self.executor.next_transfer()) is not None:
            self.clock.move_to(moment)  # all that can be done is to wait for the link
        self.run.steps.append(StepRun(start, self.clock.now, *sizes(plans), *self.core.counts))
        for message in out.finished:
            event = self.live.finish(message.request_id)
            self.run.outcomes.append(Outcome.of(event.ordinal, event.request, event.at, message))
        if self.stops:
            self._stop(out)

    def _stop(self, out: TokensOut) -> None:
        """End samples that have said what ended them."""
        for handle in out.samples.tolist():
            self.heard[handle] += 1
            stop = self.stops.get(handle)
            if stop is not None and self.heard[handle] >= stop.num_tokens:
                del self.stops[handle]
                self.core.abort(stop.abort)


def _inputs(events: list[Event]) -> list[_Input]:
    """All that came in, in order, without the ends that what was said brought about."""
    found, step_at = list[_Input](), events[-1].at if events else 0.0
    for event in reversed(events):
        if isinstance(event, Stepped):
            step_at = event.at
        elif not isinstance(event, Aborted) or not event.stop:
            found.append(_Input(event, step_at))
    return found[::-1]
