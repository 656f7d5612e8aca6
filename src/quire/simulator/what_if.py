"""Simulates the requests of a recording under another configuration.

Every request arrives at its recorded time, even if its client sent it in reaction to an earlier output. A step takes
the time that a cost model, fitted to the recorded steps, predicts for its size. Every sample generates its recorded
tokens.
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
from quire.simulator.engine import InstantFetch, RecordedModel, count_work, make_replayed_core
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.grammars import ReplayedGrammars
from quire.simulator.recording import (
    Aborted,
    AdapterLoaded,
    AdapterUnloaded,
    CacheReset,
    Event,
    Recording,
    RecordingError,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.simulator.run import Outcome, Run, StepRun
from quire.simulator.transfers import TransferCost, fit_transfer_cost
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.output import TokensOut
from quire.types.request import Abort, Submit


@dataclass(frozen=True, slots=True)
class Scenario:
    """A recording and the fitted costs of its steps and transfers. `run` simulates it under any configuration."""

    recording: Recording
    fit: Fit
    transfer_cost: TransferCost

    @classmethod
    def from_recording(cls, recording: Recording) -> Scenario:
        reports = [report for step in recording.steps() for report in step.reports]
        return cls(recording, fit_cost(recording.step_sizes()), fit_transfer_cost(reports))

    def run(self, name: str, cache: CacheConfig, scheduler: SchedulerConfig) -> Run:
        """Simulate the recording. Raises ConfigError for settings that exclude each other, and RecordingError if the
        engine dies.

        Policies that reserve blocks neither share nor swap them, so these run without a prefix cache and without tiers.
        """
        if scheduler.policy in RESERVING:
            if not cache.groups.is_plain:
                reason = "reserves blocks for whole sequences, and this model's layers keep windows or states"
                raise ConfigError("policy", f"{scheduler.policy!r} {reason}", "simulate another policy")
            cache = replace(cache, enable_prefix_caching=False, tiers=TierConfig())
            scheduler = replace(scheduler, preemption="recompute")
        check_tiers(cache.tiers, scheduler.preemption, scheduler.policy, cache.layout)
        return _Simulation(self, Run(name, cache, scheduler)).execute()


class _Input(NamedTuple):
    """An input event and the time of the recorded step after it. An idle engine takes all inputs of a step together."""

    event: Event
    step_at: float


@dataclass(slots=True)
class _Stop:
    """The abort of a sample that a stop string ended when it had `num_tokens` tokens."""

    num_tokens: int
    abort: Abort


@dataclass(slots=True)
class _Simulation:
    scenario: Scenario
    run: Run
    clock: VirtualClock = field(default_factory=VirtualClock)
    live: UnfinishedRequests[Submitted] = field(default_factory=UnfinishedRequests)
    ids: dict[int, str] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)  # by ordinal: the time its grammar is compiled
    stops: dict[int, _Stop] = field(default_factory=dict)  # by sample handle
    num_tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by sample handle
    model: RecordedModel = field(init=False)
    executor: SimulatedExecutor = field(init=False)
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        recording, run = self.scenario.recording, self.run
        setup, outputs = recording.setup, recording.outputs
        self.model = RecordedModel(outputs, run.scheduler.num_rows)
        cost, transfer_cost = self.scenario.fit.cost, self.scenario.transfer_cost
        found = tuple(file for step in recording.steps() for report in step.reports for file in report.found)
        files = found if run.cache.tiers.disk_path else ()
        self.executor = SimulatedExecutor(self.clock, cost, self.model, setup.depth, transfer_cost, files)
        self.core = make_replayed_core(
            self.executor,
            setup,
            self.model,
            cache=run.cache,
            scheduler=run.scheduler,
            grammars=ReplayedGrammars(outputs.grammars, setup.vocab_size, self._is_ready, self._wait),
            clock=self.clock,
        )
        self.core.adapters.fetch = InstantFetch()
        for step in recording.steps():
            self.ready_at |= dict.fromkeys(step.compiled, step.at)

    def _is_ready(self, ordinal: int) -> bool:
        return self.clock.now >= self.ready_at.get(ordinal, 0.0)

    def _wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def execute(self) -> Run:
        events = self.scenario.recording.events
        stops = {(e.ordinal, e.index): e.num_tokens for e in events if isinstance(e, Aborted) and e.stop}
        inputs, core = deque(_inputs(events)), self.core
        while inputs or core.has_work:
            now = self.clock.now if core.has_work else max(self.clock.now, inputs[0].step_at)
            while inputs and inputs[0].event.at <= now:
                event = inputs.popleft().event
                self.clock.move_to(event.at)
                self._apply(event, stops)
            self.clock.move_to(now)
            if core.has_work:
                self._step()
        core.check()
        self.run.outcomes.sort(key=lambda outcome: outcome.ordinal)
        return self.run

    def _apply(self, event: Event, stops: dict[tuple[int, int | None], int]) -> None:
        if isinstance(event, Submitted):
            self._submit(event, stops)
        elif isinstance(event, Aborted) and event.ordinal in self.ids:
            self.core.abort(Abort(self.ids[event.ordinal], event.index))
        elif isinstance(event, CacheReset):
            self.core.reset_cache()
        elif isinstance(event, Unpinned):
            self.core.unpin(event.salt, event.name)
        elif isinstance(event, AdapterLoaded):
            self.core.adapters.add(event.info)
        elif isinstance(event, AdapterUnloaded):
            self.core.adapters.unload(event.name)

    def _submit(self, event: Submitted, stops: dict[tuple[int, int | None], int]) -> None:
        request = self._without_priority(event.request)
        self.live.add(request.request_id, event)
        self.ids[event.ordinal] = request.request_id
        try:
            handle = self._submit_branch(request)
        except InvalidRequest as error:
            self.live.refuse(request.request_id)
            del self.ids[event.ordinal]
            self.run.outcomes.append(Outcome(event.ordinal, request, event.at, refused=str(error)))
            return
        for index in range(request.sampling.n):
            count = stops.get((event.ordinal, index), stops.get((event.ordinal, None)))
            if count is not None:
                self.stops[handle + index] = _Stop(count, Abort(request.request_id, index, "stop"))

    def _without_priority(self, request: Submit) -> Submit:
        """Remove the priority of a request if the policy would refuse it."""
        return request if self.run.scheduler.policy == "priority" else replace(request, priority=0)

    def _submit_branch(self, request: Submit) -> int:
        """Submit a request. If it branches off tokens that do not exist yet, submit it without its source."""
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
        plans = self.model.take_plans()
        if not plans and self.clock.now == start and (moment := self.executor.next_transfer()) is not None:
            self.clock.move_to(moment)  # the engine can only wait for a transfer
        self.run.steps.append(StepRun(start, self.clock.now, *count_work(plans), *self.core.counts))
        for message in out.finished:
            event = self.live.finish(message.request_id)
            self.run.outcomes.append(Outcome.from_message(event.ordinal, event.request, event.at, message))
        if self.stops:
            self._stop(out)

    def _stop(self, out: TokensOut) -> None:
        """Abort the samples that have reached the token at which a stop string ended them."""
        for handle in out.samples.tolist():
            self.num_tokens[handle] += 1
            stop = self.stops.get(handle)
            if stop is not None and self.num_tokens[handle] >= stop.num_tokens:
                del self.stops[handle]
                self.core.abort(stop.abort)


def _inputs(events: list[Event]) -> list[_Input]:
    """Return the inputs in order, without the aborts that a stop string caused."""
    found, step_at = list[_Input](), events[-1].at if events else 0.0
    for event in reversed(events):
        if isinstance(event, Stepped):
            step_at = event.at
        elif not isinstance(event, Aborted) or not event.stop:
            found.append(_Input(event, step_at))
    return found[::-1]
