"""An engine that is recorded: the same decisions, and a note of each for a tape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.batch import Batch
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.pipeline import Flight
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
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.output import TokensOut
from quire.types.request import Abort, Submit
from quire.types.step import Candidates, RowDraft, StepPlan, StepResult
from quire.types.transfer import TransferReport


def condition(scheduler: Scheduler) -> tuple[int, int, int, int, int]:
    """Blocks that are held, groups that run, groups that wait; preemptions and swaps since the start."""
    queues = len(scheduler.running), len(scheduler.waiting)
    return scheduler.pool.num_used, *queues, scheduler.num_preemptions, scheduler.preemption.num_swaps


class _NotedTransfers:
    """An executor whose reports of transfers are noted."""

    def __init__(self, inner: Executor, note: Callable[[Moved], None]) -> None:
        self._inner, self._note = inner, note
        self.depth, self.launch, self.collect, self.close = inner.depth, inner.launch, inner.collect, inner.close

    def transfers(self) -> TransferReport:
        report = self._inner.transfers()
        self._note(Moved(report))
        return report


class RecordedCore(EngineCore):
    """An EngineCore whose inputs and decisions go to a tape, which it closes.

    All that decides is noted: requests, aborts, results, and every reading of the clock, in microseconds. So the same
    calls over the noted results and readings decide the same. The tape never holds up a step and never fails one.
    """

    def __init__(
        self,
        executor: Executor,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        vocab_size: int,
        *,
        tape: Tape,
        tools: DecodingTools | None = None,
        depth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tape, self._time, self._readings = tape, clock, list[float]()
        self._happened: list[Launched | Collected | Moved | GrammarNote] = []  # since the last step
        note = self._happened.append
        executor = _NotedTransfers(executor, note) if cache.tiers.enabled else executor
        tools = tools or DecodingTools()
        self._grammars = NotedGrammars(tools.grammars, note)
        tools = replace(tools, grammars=self._grammars)
        super().__init__(executor, cache, scheduler, vocab_size, tools=tools, depth=depth, clock=self._read)
        self._ordinals: OpenRequests[int] = OpenRequests()
        self._num_searches = 0
        self._compiled: tuple[int, ...] = ()
        self._took: tuple[float, ...] = ()  # of the step that was collected, if one was

    def _read(self) -> float:
        now = round(self._time(), 6)
        self._readings.append(now)
        return now

    def _take_readings(self) -> Clock:
        readings, self._readings = tuple(self._readings), []
        return readings

    # ------------------------------------------------------------------------------------------------- inputs
    def submit(self, request: Submit) -> int:
        self._grammars.ordinal = self._ordinal
        try:
            handle = super().submit(request)
        except Exception:
            self._readings.clear()
            raise
        ordinal = self._ordinal - 1
        self._ordinals.add(request.request_id, ordinal)
        self._num_searches += request.beam is not None
        self._tape.put(Submitted(ordinal, request, self._take_readings()))
        return handle

    def abort(self, abort: Abort) -> None:
        group = self._groups.get(abort.request_id)
        if group is None:
            return
        book, live = self._scheduler.rows, [s for s in group.live if abort.index in (None, s.index)]
        counts = [len(s.outputs) if s.row is None else int(book.counts[s.row]) for s in live]
        super().abort(abort)
        self._tape.put(Aborted(group.ordinal, abort, max(counts, default=0), self._take_readings()))

    def reset_cache(self) -> int:
        num_freed = super().reset_cache()
        self._tape.put(CacheReset(self._take_readings()))
        return num_freed

    def unpin(self, salt: str, name: str) -> bool:
        was_there = super().unpin(salt, name)
        self._tape.put(Unpinned(salt, name, self._take_readings()))
        return was_there

    def leisure(self) -> float:
        seconds = super().leisure()
        self._readings.clear()  # nothing is decided by it
        return seconds

    # ---------------------------------------------------------------------------------------------------- steps
    def step(self) -> TokensOut:
        out = super().step()
        scheduler = self._scheduler
        finished = tuple((self._ordinals.take(message.request_id), message) for message in out.finished)
        counts = condition(scheduler)
        happened = tuple(self._happened)
        self._happened.clear()
        readings = self._take_readings()
        self._tape.put(Stepped(happened, readings, self._took, self._compiled, finished, *counts, self.dead))
        self._took = self._compiled = ()
        return out

    def _take_compiled(self) -> None:
        before = list(self._compiling)
        super()._take_compiled()
        self._compiled = tuple(group.ordinal for group in before if group not in self._compiling)

    def _make_flight(self, plan: StepPlan) -> Flight:
        flight = super()._make_flight(plan)
        seats = find_seats(plan, self._scheduler.rows) if plan.new_rows else ()
        searches = find_searches(flight, self._scheduler.running) if self._num_searches and flight.paced else ()
        self._happened.append(Launched(plan, seats, searches))
        return flight

    def _commit(self, flight: Flight, result: StepResult) -> Batch:
        since, candidates = max(flight.launched, self._last_commit), result.candidates
        if candidates is not None:
            candidates = Candidates(candidates.samples.copy(), candidates.token_ids.copy(), candidates.scores.copy())
        ranked = tuple(each for each in result.logprobs if self._is_ranked(each.row))
        tokens = np.array(result.token_ids)  # the executor's own may be used again
        drafts = tuple(RowDraft(draft.row, draft.token_ids.copy()) for draft in result.drafts)
        self._happened.append(Collected(tokens, ranked, result.failures, candidates, drafts))
        batch = super()._commit(flight, result)
        self._took = (self._last_commit - since,)
        return batch

    def _is_ranked(self, row: int) -> bool:
        """Whether a row's logprobs decide something."""
        sequence = self._scheduler.rows.sequences[row]
        return sequence is not None and sequence.group.search is None and sequence.group.is_ranked

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._tape.close()
