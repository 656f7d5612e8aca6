"""The engine core: it accepts requests, and each `step` plans a step, launches it, and commits the oldest result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine import submission
from quire.engine.adapters import AdapterTable
from quire.engine.commit import NO_BATCH, Batch, Committer
from quire.engine.counters import Counters
from quire.engine.decoding.controller import Ending, Fault, fault_of
from quire.engine.decoding.grammar import Compilation, Matcher
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.guided_rows import GuidedRows
from quire.engine.handover import make_handover
from quire.engine.in_flight import InFlightStep, Pipeline
from quire.engine.kvcache.pinned_prefixes import PinnedPrefixes
from quire.engine.observer import EngineObserver
from quire.engine.paced_results import PacedResults, beam_ends
from quire.engine.scheduler.queue import RunningGroups
from quire.engine.scheduler.row_table import RowTable
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.standby import HELD, LiveRequests, Standby
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import Finished, SampleEnd, TokensOut
from quire.types.request import Abort, Submit
from quire.types.stats import BlockMap, EngineStats

_COMPILING_SECONDS = 0.02  # how long to wait for a grammar if there is nothing else to do
_FETCHING_SECONDS = 0.001  # how long to wait for files of the disk tier
_LEAST_FORCED = 4  # tokens that a grammar must force for a sequence to be paced, with several steps in flight


class EngineCore:
    """Accepts requests and runs steps. Every accepted request gets exactly one terminal message (Finished).

    Not thread-safe: one thread submits, aborts and steps. `depth` overrides how many steps are kept in flight. An
    exception in one request's own code ends that request alone; any other exception in a step ends all of them
    (`_die`).
    """

    def __init__(
        self,
        executor: Executor,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        vocab_size: int,
        *,
        tools: DecodingTools | None = None,
        depth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: EngineObserver | None = None,
    ) -> None:
        self.executor, self._cache, self._config, self._vocab_size = executor, cache, scheduler, vocab_size
        self._tools, self._clock, self._observer = tools or DecodingTools(), clock, observer or EngineObserver()
        self._scheduler = Scheduler(cache, scheduler)
        self.adapters = AdapterTable(self._scheduler.adapters, executor, self._observer)
        self._pipeline = Pipeline(executor, depth, clock, scheduler.micro_batches)
        self._scheduler.paced.least_forced = 1 if self._pipeline.most_ahead == 1 else _LEAST_FORCED
        self._guided = GuidedRows(self._scheduler, self._tools.grammars.vocab_size, self._end, self._fail)
        self._paced = PacedResults(self._scheduler, self._end, self._fail, self._finish_search)
        proposers = self._tools.proposers
        self._committer = Committer(self._scheduler, proposers, self._guided, self._paced, self._end, self._fail, clock)
        self._compiling: dict[Group, Compilation] = {}
        self._groups: dict[str, Group] = {}
        live = LiveRequests(self._groups, self._compiling, self._pipeline)
        self.standby = Standby(self, self._scheduler, live, cache, is_recorded=observer is not None)
        self._finished: list[Finished] = []
        self._handover = make_handover(cache.tiers, self._scheduler.tiers, clock)
        self._next_handle = self._ordinal = 0
        self._dead: str | None = None
        self._counters, self._last_commit = Counters(), 0.0

    # ------------------------------------------------------------------------------------------------ requests
    def submit(self, request: Submit) -> int:
        """Accept a request. Returns a handle; tokens of its sample i carry handle + i. Raises InvalidRequest or
        EngineDead."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self.standby.is_active:
            self.standby.admit()
        submission.check_id(request.request_id, self._groups)
        self._observer.submitting()
        try:
            group = self._accept(request)
        except Exception as error:
            self.pins.pin_or_release(request, None)
            self._observer.refused()
            if isinstance(error, InvalidRequest):
                raise
            reason = f"failed inside the engine: {error!r}"
            raise InvalidRequest("request", reason, "change it or report this") from error
        self._ordinal += 1
        self._next_handle += request.sampling.n
        self._groups[request.request_id] = group
        if request.adapter:
            self.adapters.hold(group.request)
        self._observer.submitted(group)
        return group.handle

    def _accept(self, request: Submit) -> Group:
        """Check a request and make its group. The group joins the queue now, or when its grammar is compiled."""
        asked = self.adapters.resolve(request) if request.adapter or request.adapter_digest else request
        pins, cache, config, vocab_size = self._scheduler.pins, self._cache, self._config, self._vocab_size
        request = pins.pad_prompt(asked) if asked.pin else asked
        has_text, num_pinned = self._tools.vocabulary is not None, pins.num_reserved
        limit = submission.check_request(request, cache, config, vocab_size, has_text=has_text, num_pinned=num_pinned)
        group = submission.make_group(request, self._ordinal, limit, self._next_handle, vocab_size, config.seed)
        group.has_whole_images = config.images is not None and config.images.grid.is_whole
        group.arrival = self._clock()
        if request.source is not None:
            group.origin = submission.find_origin(request, self._groups, self._scheduler.rows)
        if request.pin:
            live, chunk = self._groups.values(), config.max_num_batched_tokens
            most = max((submission.most_blocks(each.request, each.limit, cache, chunk) for each in live), default=0)
            pins.reserve(asked, most)
        group.ledger.note("queued", group.arrival, group.num_prompt)
        if request.rules.grammar:
            self._compiling[group] = self._tools.compile(request.rules)
        elif self.standby.is_active and self.standby.holds:
            self._compiling[group] = HELD
        else:
            self._enqueue(group, None)
        return group

    def _enqueue(self, group: Group, matcher: Matcher | None) -> None:
        controller = submission.make_controller(group, self._tools, matcher)
        submission.add_sequences(group, self._scheduler.new_table, controller)
        self._scheduler.add(group)

    def abort(self, abort: Abort) -> None:
        """End a request, or one of its samples, now. The terminal message comes with the next step. Idempotent.

        Samples of best_of and beams have no index before they are ranked: only the whole request can be aborted.
        """
        group = self._groups.get(abort.request_id)
        if group is None:
            return
        self._observer.aborting(group, abort)
        try:
            self._abort(group, abort)
        except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
            self._fail(group, fault_of(error))
        self._observer.aborted(group, abort)

    def _abort(self, group: Group, abort: Abort) -> None:
        ending: Ending = ("abort", None) if abort.stop_reason is None else ("stop", abort.stop_reason)
        if group in self._compiling:
            if submission.end_uncompiled(group, abort.index, ending):
                self._finish_request(group, group.finish_message(self._clock()))
        elif group.search is not None:
            if abort.index is None:
                self._finish_search(group, ending)
        elif abort.index is None or not group.is_ranked:
            for sequence in [s for s in group.live if abort.index in (None, s.index)]:
                self._end(sequence, ending)

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def dead(self) -> str | None:
        """Why the engine accepts no more requests; None while it lives."""
        return self._dead

    @property
    def has_work(self) -> bool:
        """Whether `step` has work: a live request, a message to return, a step in flight, or a copy between tiers."""
        has_transfers = self._dead is None and self._scheduler.tiers.has_transfers
        is_live = self._groups and not (self.standby.is_active and self.standby.rests)
        return bool(is_live or self._finished or len(self._pipeline) or has_transfers or self._handover)

    @property
    def pins(self) -> PinnedPrefixes:
        """The pinned prefixes."""
        return self._scheduler.pins

    def unpin(self, salt: str, name: str) -> bool:
        """Unpin a prompt. Returns False if no pin has that name."""
        was_there = self.pins.remove(salt, name)
        self._observer.unpinned(salt, name)
        return was_there

    def slack_seconds(self) -> float:
        """Seconds the caller may wait before the next `step()`. A request submitted within that time starts no later
        than if `step()` were called now."""
        seconds = 0.0 if self._finished else self._pipeline.slack_seconds()
        self._observer.asked_for_slack()
        return seconds

    # ---------------------------------------------------------------------------------------------------- steps
    def step(self) -> TokensOut:
        """Launch planned steps, wait for the oldest one in flight, and return its output and all terminal messages."""
        batch = NO_BATCH
        try:
            self._enqueue_compiled()
            self._guided.finish_masks()
            if self._scheduler.adapters.host.missing:
                self.adapters.take_fetched()
            if self._scheduler.tiers.expects_report:
                self._scheduler.tiers.apply_report(self.executor.transfers())
            self._pipeline.fill(self._plan_step, self._guided.supply)
            if len(self._pipeline):
                batch = self._commit_oldest()
            elif self._compiling:
                self._tools.grammars.wait(_COMPILING_SECONDS)
            elif self._groups or self._handover:
                time.sleep(_FETCHING_SECONDS)
            if not self._groups:
                self._scheduler.check_idle()
        except Exception as error:  # noqa: BLE001 - whatever failed, every request must get its terminal message
            self._die(error)
        finished, self._finished = tuple(self._finished), []
        if self._handover is not None:
            finished = self._handover.take(finished, is_dead=self._dead is not None)
        out = TokensOut(self._counters.steps, *batch, finished, self._paced.take_best())
        self._observer.stepped(out)
        return out

    def _enqueue_compiled(self) -> None:
        """Add groups whose grammar is compiled to the waiting queue; fail groups whose grammar has failed."""
        for group, compilation in list(self._compiling.items()):
            if self.standby.is_active and self.standby.holds:
                return
            try:
                if not compilation.is_ready:
                    continue
                self._enqueue(group, compilation.matcher(group.request.rules))
                del self._compiling[group]
                for index in [sample.index for sample in group.ended]:  # samples that were aborted in the meantime
                    self._scheduler.end(group.live.pop(next(i for i, s in enumerate(group.live) if s.index == index)))
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                self._fail(group, fault_of(error))
            self._observer.compiled(group)

    def _plan_step(self) -> InFlightStep | None:
        """Plan the next step. Returns None if nothing can be computed now. A paused or sleeping engine only copies and
        deletes blocks of the tiers, which commands wait for. A dead engine plans nothing."""
        plan = None
        if self._dead is None and self.standby.is_active and self.standby.stops:
            plan = self._scheduler.plan_transfers()
        elif self._dead is None:
            plan = self._scheduler.plan(self._clock(), self._pipeline.busy)
        step = None
        if plan is not None:
            step = self._committer.prepare(plan)
            self._counters.note_plan(plan, step.num_tokens)
            self._observer.planned(step)
        if self._scheduler.paced.faults:
            for group, fault in self._scheduler.paced.take_faults():
                self._fail(group, fault)
        return step

    def _commit_oldest(self) -> Batch:
        """Wait for the oldest step in flight and commit its result."""
        step, result = self._pipeline.collect()
        self._observer.collected(step, result)
        batch, num_outputs = self._committer.commit(step, result)
        now = self._clock()
        self._counters.note_step(now - step.launched, num_outputs)
        since, self._last_commit = max(step.launched, self._last_commit), now
        if num_tokens := step.num_tokens:
            self._scheduler.note_step(step.plan, num_tokens, now - since)
            self._tools.proposers.note_step(num_tokens, step.num_samples, now - since)
        self._observer.committed(step, now - since)
        return batch

    # ------------------------------------------------------------------------------------------------------ ends
    def _end(self, sequence: Sequence, ending: Ending) -> None:
        """End one sample, and with the last sample its request. An exception fails this request alone."""
        group = sequence.group
        try:
            group.end(sequence, self._scheduler.end(sequence), *ending)
            if not group.live:
                self._finish_request(group, group.finish_message(self._clock()))
        except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
            self._fail(group, fault_of(error))

    def _finish_search(self, group: Group, cut_off: Ending | None = None) -> None:
        """End a beam search. `cut_off` is the reason if the search is cut off before its end."""
        group.ended.extend(beam_ends(group, cut_off))
        for sequence in group.live:
            self._scheduler.end(sequence, keep=False)
        group.live.clear()
        self._finish_request(group, group.finish_message(self._clock()))

    def _fail(self, group: Group, fault: Fault) -> None:
        """End a whole request with an error. Its message keeps the tokens it has generated."""
        if self._groups.get(group.request.request_id) is not group:
            return
        if group.search is not None and group.live and not group.ended:
            group.ended.append(SampleEnd(0, tuple(group.leader.outputs), "error"))
        for sequence in list(group.live):
            with suppress(Exception):  # the request may fail again as its controller is closed, which comes last
                self._scheduler.end(sequence, keep=False)
            group.live.remove(sequence)
            if group.search is None and all(sample.index != sequence.index for sample in group.ended):
                group.ended.append(SampleEnd(sequence.index, tuple(sequence.outputs), "error"))
        self._finish_request(group, submission.fault_message(group, fault, self._clock()))

    def _finish_request(self, group: Group, message: Finished) -> None:
        """Remove a group from the engine, and return its terminal message with the next step."""
        if self._compiling.pop(group, None) is None:
            self._scheduler.remove(group)
        del self._groups[group.request.request_id]
        if group.request.adapter:
            self.adapters.release(group.request)
        self._finished.append(message)
        self._counters.finished += 1
        if group.request.pin:
            self.pins.pin_or_release(group.request, message)

    def _die(self, error: Exception) -> None:
        """Stop the engine after a fatal error, such as one of the executor. All requests end with an error, and no more
        are accepted."""
        self._dead = f"the engine stopped: {error!r}"
        self._pipeline.clear()
        for request_id, group in list(self._groups.items()):
            try:
                self._fail(group, Fault(self._dead))
            except Exception:  # noqa: BLE001 - a broken group must not keep the others from ending
                self._groups.pop(request_id, None)
                self._compiling.pop(group, None)
                self._finished.append(Finished(request_id, tuple(group.ended), error=self._dead))

    # ------------------------------------------------------------------------------------------------------ state
    @property
    def rows(self) -> RowTable:
        """The row table, for observers."""
        return self._scheduler.rows

    @property
    def running(self) -> RunningGroups:
        """The running groups, for observers."""
        return self._scheduler.running

    @property
    def num_submitted(self) -> int:
        """The number of accepted requests, which is the ordinal of the next one."""
        return self._ordinal

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Held blocks, running and waiting groups; preemptions and swaps since the start."""
        scheduler = self._scheduler
        queues = len(scheduler.running), len(scheduler.waiting)
        return scheduler.pool.num_used, *queues, scheduler.num_preemptions, scheduler.preemption.num_swaps

    def group(self, request_id: str) -> Group | None:
        """Return the group of a live request."""
        return self._groups.get(request_id)

    def stats(self) -> EngineStats:
        return self._counters.stats(
            self._scheduler, self._paced, self._cache, self.adapters, self.standby.state.sleep_level
        )

    @property
    def num_ready(self) -> int:
        """Waiting requests that could run now if rows, blocks and tokens of a step were available."""
        return self._scheduler.waiting.num_ready

    def block_map(self) -> BlockMap:
        """Return the holders of all blocks, and the blocks of each request."""
        return self._scheduler.block_map(self._counters.steps)

    def reset_cache(self) -> int:
        """Empty the prefix cache, pinned prefixes included. Returns how many blocks became free."""
        num_freed = self._scheduler.reset_cache()
        self._observer.cache_reset()
        return num_freed

    def check(self) -> None:
        """Assert that all parts agree, and that no block is held without a request or a pin."""
        self._scheduler.check()
        self.adapters.check(self._groups.values())
        assert set(self._groups.values()) == {*self._scheduler.running, *self._scheduler.waiting, *self._compiling}
        if not self._groups:
            assert self._scheduler.pool.num_used == self.pins.num_blocks

    def close(self) -> None:
        """Write the pending blocks to the tiers, and close the executor. Idempotent."""
        try:
            if not self._groups and self.has_work:
                self.step()
            self._guided.close()
            self._tools.grammars.close()
            self.executor.close()
        finally:
            self._observer.close()
