"""Records what an engine takes in and decides, by observing it."""

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
from quire.engine.recording.grammars import NotedGrammars
from quire.engine.recording.items import (
    Aborted,
    CacheReset,
    Clock,
    Collected,
    GrammarNote,
    Launched,
    Moved,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.engine.recording.open import OpenRequests
from quire.engine.recording.rows import find_searches, find_seats
from quire.engine.recording.tape import Tape
from quire.types.output import TokensOut
from quire.types.request import Abort
from quire.types.step import Candidates, RowDraft, StepResult
from quire.types.transfer import TransferReport


class _NotedTransfers:
    """An executor whose reports of transfers are noted."""

    def __init__(self, inner: Executor, note: Callable[[Moved], None]) -> None:
        self._inner, self._note = inner, note
        self.depth, self.launch, self.supply_masks = inner.depth, inner.launch, inner.supply_masks
        self.collect, self.close = inner.collect, inner.close

    def transfers(self) -> TransferReport:
        report = self._inner.transfers()
        self._note(Moved(report))
        return report


class Recorder(EngineObserver):
    """Writes an engine's inputs and decisions to a tape, which it closes with the engine.

    It notes all that decides: requests, aborts, results, and every reading of the clock, in microseconds. So the same
    calls over the noted results and readings decide the same. The tape never holds up a step and never fails one. The
    engine must be made with the recorder's `clock`, and with what `watch_executor` and `watch_tools` return: see
    `make_recorded_core`.
    """

    def __init__(self, tape: Tape, clock: Callable[[], float] = time.monotonic) -> None:
        self._tape, self._time, self._readings = tape, clock, list[float]()
        self._happened: list[Launched | Collected | Moved | GrammarNote] = []  # since the last step
        self._ordinals: OpenRequests[int] = OpenRequests()
        self._num_searches = 0
        self._grammars: NotedGrammars | None = None
        self._core: EngineCore | None = None
        self._aborting = 0  # tokens that the samples of an abort had
        self._compiled: list[int] = []
        self._took: tuple[float, ...] = ()  # seconds of the step that was collected, if one was

    def watch_executor(self, executor: Executor, *, has_tiers: bool) -> Executor:
        """The executor, with its reports of transfers noted."""
        return _NotedTransfers(executor, self._happened.append) if has_tiers else executor

    def watch_tools(self, tools: DecodingTools) -> DecodingTools:
        """The tools, with what grammars say noted."""
        self._grammars = NotedGrammars(tools.grammars, self._happened.append)
        return replace(tools, grammars=self._grammars)

    def watch(self, core: EngineCore) -> None:
        """The engine whose observer this is."""
        self._core = core

    def clock(self) -> float:
        """The time, noted."""
        now = round(self._time(), 6)
        self._readings.append(now)
        return now

    def _take_readings(self) -> Clock:
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
        self._tape.put(Submitted(group.ordinal, group.request, self._take_readings()))

    def aborting(self, group: Group, abort: Abort) -> None:
        assert self._core is not None
        table, live = self._core.rows, [s for s in group.live if abort.index in (None, s.index)]
        counts = [len(s.outputs) if s.row is None else int(table.counts[s.row]) for s in live]
        self._aborting = max(counts, default=0)

    def aborted(self, group: Group, abort: Abort) -> None:
        self._tape.put(Aborted(group.ordinal, abort, self._aborting, self._take_readings()))

    def cache_reset(self) -> None:
        self._tape.put(CacheReset(self._take_readings()))

    def unpinned(self, salt: str, name: str) -> None:
        self._tape.put(Unpinned(salt, name, self._take_readings()))

    def asked_for_slack(self) -> None:
        self._readings.clear()  # nothing is decided by it

    # ---------------------------------------------------------------------------------------------------- steps
    def compiled(self, group: Group) -> None:
        self._compiled.append(group.ordinal)

    def planned(self, step: InFlightStep) -> None:
        assert self._core is not None
        seats = find_seats(step.plan, self._core.rows) if step.plan.new_rows else ()
        searches = find_searches(step, self._core.running) if self._num_searches and step.paced else ()
        self._happened.append(Launched(step.plan, seats, searches))

    def collected(self, step: InFlightStep, result: StepResult) -> None:  # noqa: ARG002
        candidates = result.candidates
        if candidates is not None:
            candidates = Candidates(candidates.samples.copy(), candidates.token_ids.copy(), candidates.scores.copy())
        ranked = tuple(each for each in result.logprobs if self._is_ranked(each.row))
        tokens = np.array(result.token_ids)  # the executor's own may be used again
        drafts = tuple(RowDraft(draft.row, draft.token_ids.copy()) for draft in result.drafts)
        self._happened.append(Collected(tokens, ranked, result.failures, candidates, drafts))

    def committed(self, step: InFlightStep, seconds: float) -> None:  # noqa: ARG002
        self._took = (seconds,)

    def stepped(self, out: TokensOut) -> None:
        assert self._core is not None
        finished = tuple((self._ordinals.take(message.request_id), message) for message in out.finished)
        happened = tuple(self._happened)
        self._happened.clear()
        compiled, self._compiled = tuple(self._compiled), []
        readings, counts = self._take_readings(), self._core.counts
        self._tape.put(Stepped(happened, readings, self._took, compiled, finished, *counts, self._core.dead))
        self._took = ()

    def _is_ranked(self, row: int) -> bool:
        """Whether a row's logprobs decide something."""
        assert self._core is not None
        sequence = self._core.rows.sequences[row]
        return sequence is not None and sequence.group.search is None and sequence.group.is_ranked

    def close(self) -> None:
        self._tape.close()


def make_recorded_core(
    executor: Executor,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    vocab_size: int,
    *,
    tape: Tape,
    tools: DecodingTools | None = None,
    depth: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """An engine that is recorded to a tape; closing it closes the tape."""
    recorder = Recorder(tape, clock)
    executor = recorder.watch_executor(executor, has_tiers=cache.tiers.enabled)
    tools = recorder.watch_tools(tools or DecodingTools())
    core = EngineCore(
        executor, cache, scheduler, vocab_size, tools=tools, depth=depth, clock=recorder.clock, observer=recorder
    )
    recorder.watch(core)
    return core
