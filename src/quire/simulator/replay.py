"""Replays a recording call by call, over the recorded outputs and clock readings, and compares every decision."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.adapter_fetch import Fetched
from quire.engine.core import EngineCore
from quire.engine.recording.events import UnfinishedRequests
from quire.simulator.clock import RecordedClock
from quire.simulator.engine import RecordedFetch, RecordedModel, count_work, make_replayed_core
from quire.simulator.grammars import ReplayedGrammars
from quire.simulator.recording import (
    Aborted,
    AdapterLoaded,
    AdapterUnloaded,
    CacheReset,
    Ended,
    Event,
    Recording,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.simulator.run import Outcome, Run, StepRun
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest, QuireError
from quire.types.ledger import make_entries
from quire.types.output import Finished
from quire.types.request import Abort
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs from the recorded one."""

    call: int  # number of the call of `step`, from 1
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"step call {self.call}: {self.what}: recorded {self.recorded}, replayed {self.replayed}"


class _ReplayExecutor:
    """Returns recorded results at once, and the recorded transfer reports."""

    def __init__(self, model: RecordedModel, depth: int) -> None:
        self.depth = depth
        self._model = model
        self._results: deque[StepResult] = deque()
        self.reports: deque[TransferReport] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self._model(plan))

    def supply_masks(self, masks: Masks | None) -> None:
        """Do nothing: the model's tokens are recorded, so masks change nothing."""

    def collect(self) -> StepResult:
        return self._results.popleft()

    def transfers(self) -> TransferReport:
        return self.reports.popleft() if self.reports else NOTHING_MOVED

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Refuse: a replay knows only the adapters in its recording."""
        raise InvalidRequest("lora_path", f"{folder!r} cannot be read in a replay, as {name!r}", "record it")

    def forget_adapter(self, digest: str) -> None:
        """Do nothing: no adapter is stored."""

    def close(self) -> None:
        self._results.clear()


@dataclass(slots=True)
class ReplayResult:
    """The replayed run, and the first difference from the recording, at which the replay stopped."""

    run: Run
    difference: Difference | None = None


def replay(recording: Recording) -> ReplayResult:
    """Replay a recording under its own configuration."""
    return _Replay(recording).execute()


@dataclass(slots=True)
class _Replay:
    recording: Recording
    calls: int = 0
    ready: set[int] = field(default_factory=set)  # requests whose grammars are compiled
    live: UnfinishedRequests[Submitted] = field(default_factory=UnfinishedRequests)
    ids: dict[int, str] = field(default_factory=dict)
    clock: RecordedClock = field(default_factory=RecordedClock)
    run: Run = field(init=False)
    model: RecordedModel = field(init=False)
    executor: _ReplayExecutor = field(init=False)
    fetch: RecordedFetch = field(default_factory=RecordedFetch)
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        setup, outputs = self.recording.setup, self.recording.outputs
        self.model = RecordedModel(outputs, setup.scheduler.num_rows)
        self.executor = _ReplayExecutor(self.model, setup.depth)
        self.run = Run("recorded", setup.cache, setup.scheduler)
        self.core = make_replayed_core(
            self.executor,
            setup,
            self.model,
            cache=setup.cache,
            scheduler=setup.scheduler,
            grammars=ReplayedGrammars(outputs.grammars, setup.vocab_size, self.ready.__contains__, lambda _: None),
            clock=self.clock,
        )
        self.core.adapters.fetch = self.fetch

    def execute(self) -> ReplayResult:
        difference = None
        for event in self.recording.events[: self.recording.fatal]:  # the cause of a fatal event is not recorded
            difference = self._compare(event)
            if difference is not None:
                break
        self.run.outcomes += [self._unfinished(submitted) for submitted in self.live.values()]
        self.run.outcomes.sort(key=lambda outcome: outcome.ordinal)
        return ReplayResult(self.run, difference)

    def _compare(self, event: Event) -> Difference | None:
        """Repeat an event, and compare its result and the number of clock readings with the recording."""
        self.clock.set_readings(event.clock)
        try:
            found = self._repeat(event)
        except QuireError as error:
            found = Difference(self.calls, "a call was refused", type(event).__name__.lower(), str(error))
        readings = len(event.clock) - self.clock.num_left + self.clock.num_missing
        if found is None and readings != len(event.clock):
            found = Difference(self.calls, "readings of the clock", len(event.clock), readings)
        return found

    def _repeat(self, event: Event) -> Difference | None:
        if isinstance(event, Stepped):
            return self._step(event)
        if isinstance(event, Submitted):
            self.live.add(event.request.request_id, event)
            self.ids[event.ordinal] = event.request.request_id
            if event.ends_by_text:
                self.ready.add(event.ordinal)
            self.core.submit(event.request)
        elif isinstance(event, Aborted):
            self.core.abort(Abort(self.ids[event.ordinal], event.index, "stop" if event.stop else None))
        elif isinstance(event, CacheReset):
            self.core.reset_cache()
        elif isinstance(event, Unpinned):
            self.core.unpin(event.salt, event.name)
        elif isinstance(event, AdapterLoaded):
            self.core.adapters.add(event.info)
        elif isinstance(event, AdapterUnloaded):
            self.core.adapters.unload(event.name)
        return None

    def _step(self, event: Stepped) -> Difference | None:
        self.calls += 1
        self.ready.update(event.compiled)
        self.executor.reports.extend(event.reports)
        self.fetch.ended = [Fetched(digest, digest if was_read else "") for digest, was_read in event.fetched]
        out = self.core.step()
        plans, counts = self.model.take_plans(), self.core.counts
        end = event.clock[-1] if event.clock else event.at
        self.run.steps.append(StepRun(event.at, end, *count_work(plans), *counts))
        found = self._compare_plans(event, plans)
        for message in out.finished:
            submitted = self.live.finish(message.request_id)
            self.run.outcomes.append(Outcome.from_message(submitted.ordinal, submitted.request, submitted.at, message))
            found = found or self._compare_end(event, submitted.ordinal, message)
        if found is None and self.core.dead is not None:
            found = Difference(self.calls, "the engine", "went on", self.core.dead)
        if found is None and counts != event.counts:
            what = "blocks held, groups running and waiting, preemptions, swaps"
            found = Difference(self.calls, what, event.counts, counts)
        return found

    def _compare_plans(self, event: Stepped, plans: list[dict[str, Any]]) -> Difference | None:
        if len(plans) != len(event.plans):
            return Difference(self.calls, "plans made", len(event.plans), len(plans))
        digests = ("digest", "blocks") if self.recording.setup.tokens == "exact" else ("digest",)
        for recorded, replayed in zip(event.plans, plans, strict=True):
            if all(recorded.get(digest) == replayed.get(digest) for digest in digests):
                continue
            for name in dict.fromkeys((*recorded, *replayed)):
                if name not in ("digest", "blocks") and recorded.get(name) != replayed.get(name):
                    what = f"{name} of plan {recorded['n']}"
                    return Difference(self.calls, what, recorded.get(name), replayed.get(name))
            return Difference(self.calls, f"which rows and blocks plan {recorded['n']} names", "some", "others")
        return None

    def _compare_end(self, event: Stepped, ordinal: int, message: Finished) -> Difference | None:
        recorded = self.recording.ends.get(ordinal)
        if recorded is None and self.recording.end_reason is None and event is self.recording.events[-1]:
            return None  # its record was truncated
        if recorded is None:
            what = f"request {message.request_id}"
            return Difference(self.calls, what, "did not end here", "ended")
        replayed = Ended(
            tuple(sample.finish_reason for sample in message.samples),
            tuple(len(sample.token_ids) for sample in message.samples),
            message.error,
            message.num_cached_tokens,
            message.num_preemptions,
            tuple(entry._replace(miss=None) for entry in message.ledger),  # its note is recorded
        )
        if self.recording.setup.tokens != "exact":
            recorded, replayed = _without_misses(recorded), _without_misses(replayed)
        if recorded != replayed:
            return Difference(self.calls, f"the end of request {message.request_id}", recorded, replayed)
        return None

    def _unfinished(self, submitted: Submitted) -> Outcome:
        """Return the outcome of a request that had not ended when the recording or its engine ended."""
        ordinal, group = submitted.ordinal, self.core.group(submitted.request.request_id)
        if (end := self.recording.ends.get(ordinal)) is not None and self.recording.dead is not None:
            counts = sum(end.lengths), end.num_cached, end.num_preemptions
            return Outcome(ordinal, submitted.request, submitted.at, end.ledger, end.reasons, *counts, end.error)
        if group is None:
            return Outcome(ordinal, submitted.request, submitted.at)
        ledger = make_entries(group.ledger.finish(self.run.end, 0, "the recording ends"))
        outcome = Outcome(ordinal, submitted.request, submitted.at, ledger)
        return replace(outcome, num_preemptions=group.num_preemptions)


def _without_misses(end: Ended) -> Ended:
    """Remove the notes that name the request whose prompt differs. If there are several such requests, the choice
    depends on token ids, which a hashed recording does not have."""
    ledger = tuple(entry._replace(note="") if entry.kind == "missed" else entry for entry in end.ledger)
    return replace(end, ledger=ledger)
