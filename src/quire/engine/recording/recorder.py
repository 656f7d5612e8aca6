"""Records the inputs and decisions of an engine by observing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.group import Group
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.in_flight import InFlightStep
from quire.engine.observer import EngineObserver
from quire.engine.recording.events import (
    Aborted,
    AdapterLoaded,
    AdapterUnloaded,
    CacheReset,
    Collected,
    Launched,
    Readings,
    StepPart,
    Stepped,
    Submitted,
    TransfersReported,
    UnfinishedRequests,
    Unpinned,
)
from quire.engine.recording.grammars import RecordedGrammars
from quire.engine.recording.rows import find_beams, find_owners
from quire.engine.recording.writer import RecordingWriter
from quire.types.adapters import AdapterInfo
from quire.types.output import TokensOut
from quire.types.request import Abort
from quire.types.step import Candidates, RowDraft, StepResult
from quire.types.transfer import TransferReport


class _RecordedExecutor:
    """Wraps an executor and records its transfer reports."""

    def __init__(self, inner: Executor, record: Callable[[TransfersReported], None]) -> None:
        self._inner, self._record = inner, record
        self.depth, self.launch, self.supply_masks = inner.depth, inner.launch, inner.supply_masks
        self.collect, self.close = inner.collect, inner.close
        self.read_adapter, self.forget_adapter = inner.read_adapter, inner.forget_adapter

    def transfers(self) -> TransferReport:
        report = self._inner.transfers()
        self._record(TransfersReported(report))
        return report


class Recorder(EngineObserver):
    """Passes the events of an engine to a writer, which it closes with the engine.

    It records everything that decisions depend on: requests, aborts, results, and every reading of the clock, rounded
    to microseconds. An engine that gets the same calls, results and readings makes the same decisions. Recording never
    delays or fails a step. The engine must use the recorder's `clock`, and the results of `wrap_executor` and
    `wrap_tools`: see `make_recorded_core`.
    """

    def __init__(self, writer: RecordingWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer, self._time, self._readings = writer, clock, list[float]()
        self._parts: list[StepPart] = []  # since the last step
        self._ordinals: UnfinishedRequests[int] = UnfinishedRequests()
        self._num_searches = 0  # beam searches so far
        self._grammars: RecordedGrammars | None = None
        self._core: EngineCore | None = None
        self._num_aborted = 0  # the most tokens that a sample of the current abort has
        self._compiled: list[int] = []
        self._fetched: list[tuple[str, bool]] = []
        self._seconds: tuple[float, ...] = ()  # duration of the committed step, if there was one

    def wrap_executor(self, executor: Executor, *, has_tiers: bool) -> Executor:
        """Return an executor whose transfer reports are recorded."""
        return _RecordedExecutor(executor, self._parts.append) if has_tiers else executor

    def wrap_tools(self, tools: DecodingTools) -> DecodingTools:
        """Return tools whose grammars are recorded."""
        self._grammars = RecordedGrammars(tools.grammars, self._parts.append)
        return replace(tools, grammars=self._grammars)

    def attach(self, core: EngineCore) -> None:
        """Set the engine that this recorder observes."""
        self._core = core

    def clock(self) -> float:
        """Return the time and record it."""
        now = round(self._time(), 6)
        self._readings.append(now)
        return now

    def _take_readings(self) -> Readings:
        readings, self._readings = tuple(self._readings), []
        return readings

    # ------------------------------------------------------------------------------------------------- inputs
    def submitting(self) -> None:
        if self._grammars is not None and self._core is not None:
            self._grammars.ordinal = self._core.num_submitted

    def refused(self) -> None:
        self._readings.clear()

    def submitted(self, group: Group) -> None:
        self._ordinals.add(group.request.request_id, group.ordinal)
        self._num_searches += group.search is not None
        self._writer.put(Submitted(group.ordinal, group.request, self._take_readings()))

    def aborting(self, group: Group, abort: Abort) -> None:
        assert self._core is not None
        table, live = self._core.rows, [s for s in group.live if abort.index in (None, s.index)]
        counts = [len(s.outputs) if s.row is None else table.count_of[s.row] for s in live]
        self._num_aborted = max(counts, default=0)

    def aborted(self, group: Group, abort: Abort) -> None:
        self._writer.put(Aborted(group.ordinal, abort, self._num_aborted, self._take_readings()))

    def cache_reset(self) -> None:
        self._writer.put(CacheReset(self._take_readings()))

    def unpinned(self, salt: str, name: str) -> None:
        self._writer.put(Unpinned(salt, name, self._take_readings()))

    def adapter_loaded(self, info: AdapterInfo) -> None:
        self._writer.put(AdapterLoaded(info, self._take_readings()))

    def adapter_unloaded(self, name: str) -> None:
        self._writer.put(AdapterUnloaded(name, self._take_readings()))

    def asked_for_slack(self) -> None:
        self._readings.clear()  # no decision depends on these readings

    # ---------------------------------------------------------------------------------------------------- steps
    def compiled(self, group: Group) -> None:
        self._compiled.append(group.ordinal)

    def adapter_fetched(self, digest: str, *, was_read: bool) -> None:
        self._fetched.append((digest, was_read))

    def planned(self, step: InFlightStep) -> None:
        assert self._core is not None
        owners = find_owners(step.plan, self._core.rows) if step.plan.new_rows else ()
        searches = find_beams(step, self._core.running) if self._num_searches and step.paced else ()
        self._parts.append(Launched(step.plan, owners, searches))

    def collected(self, step: InFlightStep, result: StepResult) -> None:  # noqa: ARG002
        candidates = result.candidates
        if candidates is not None:
            candidates = Candidates(candidates.samples.copy(), candidates.token_ids.copy(), candidates.scores.copy())
        ranked = tuple(each for each in result.logprobs if self._is_ranked(each.row))
        tokens = np.array(result.token_ids)  # the executor may reuse its array
        drafts = tuple(RowDraft(draft.row, draft.token_ids.copy()) for draft in result.drafts)
        self._parts.append(Collected(tokens, ranked, result.failures, candidates, drafts))

    def committed(self, step: InFlightStep, seconds: float) -> None:  # noqa: ARG002
        self._seconds = (seconds,)

    def stepped(self, out: TokensOut) -> None:
        assert self._core is not None
        finished = tuple((self._ordinals.finish(message.request_id), message) for message in out.finished)
        parts = tuple(self._parts)
        self._parts.clear()
        compiled, self._compiled = tuple(self._compiled), []
        fetched, self._fetched = tuple(self._fetched), []
        readings, counts = self._take_readings(), self._core.counts
        self._writer.put(Stepped(parts, readings, self._seconds, compiled, fetched, finished, *counts, self._core.dead))
        self._seconds = ()

    def _is_ranked(self, row: int) -> bool:
        """Whether a decision depends on a row's logprobs."""
        assert self._core is not None
        sequence = self._core.rows.sequences[row]
        return sequence is not None and sequence.group.search is None and sequence.group.is_ranked

    def close(self) -> None:
        self._writer.close()


def make_recorded_core(
    executor: Executor,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    vocab_size: int,
    *,
    writer: RecordingWriter,
    tools: DecodingTools | None = None,
    depth: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Build an engine whose events are recorded. Closing it closes the writer."""
    recorder = Recorder(writer, clock)
    executor = recorder.wrap_executor(executor, has_tiers=cache.tiers.enabled)
    tools = recorder.wrap_tools(tools or DecodingTools())
    core = EngineCore(
        executor, cache, scheduler, vocab_size, tools=tools, depth=depth, clock=recorder.clock, observer=recorder
    )
    recorder.attach(core)
    return core
