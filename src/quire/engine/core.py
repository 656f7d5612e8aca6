"""One step = plan -> execute -> commit."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.admission import admit, most_blocks
from quire.engine.batch import NOBODY, NOTHING, Batch, Gathered, say
from quire.engine.counters import Counters
from quire.engine.decoding.grammar import Compilation, Matcher
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.pace import Ending, Fault, fault_of
from quire.engine.decoding.stopping import explain_end, find_ends
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.kvcache.pins import Pins
from quire.engine.paced import Judged, PacedRows, beam_ends
from quire.engine.pipeline import Flight, Pipeline, find_awaited
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.submission import add_sequences, find_origin, make_group, make_pacer
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import Finished, SampleEnd, TokensOut
from quire.types.request import Abort, Submit
from quire.types.stats import BlockMap, EngineStats
from quire.types.step import Ints, StepPlan, StepResult, TokenLogprobs

_COMPILING_SECONDS = 0.02  # for a grammar, when there is nothing else to do
_FETCHING_SECONDS = 0.001  # for a file


class EngineCore:
    """Takes requests, runs steps, and says of every accepted request exactly once that it is over.

    Not thread-safe: one thread submits, aborts and steps. `depth` overrides how many steps are kept in flight.
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
    ) -> None:
        self._executor, self._cache, self._config, self._vocab_size = executor, cache, scheduler, vocab_size
        self._tools = tools or DecodingTools()
        self._scheduler = Scheduler(cache, scheduler)
        self._paced = PacedRows(self._scheduler, self._end, self._fail, self._close_search)
        self._compiling: dict[Group, Compilation] = {}
        self._pipeline = Pipeline(executor, depth or executor.depth, clock)
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._gathered = NOBODY
        self._finished: list[Finished] = []
        self._next_handle = 0
        self._ordinal = 0
        self._dead: str | None = None
        self._counters = Counters()
        self._last_commit = 0.0

    # ------------------------------------------------------------------------------------------------ requests
    def submit(self, request: Submit) -> int:
        """Accept a request; its sample i answers to the returned handle + i. Raises InvalidRequest or EngineDead."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if request.request_id in self._groups:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use", "choose another or wait for its end"
            )
        asked, request = request, self.pins.whole(request)
        has_text, num_pinned = self._tools.vocabulary is not None, self.pins.num_reserved
        limit = admit(request, self._cache, self._config, self._vocab_size, has_text=has_text, num_pinned=num_pinned)
        group = make_group(request, self._ordinal, limit, self._next_handle, self._vocab_size, self._config.seed)
        group.arrival = self._clock()
        group.origin = find_origin(request, self._groups, self._scheduler.rows)
        if request.pin:
            size, live = self._cache.block_size, self._groups.values()
            self.pins.promise(asked, max((most_blocks(each.request, each.limit, size) for each in live), default=0))
        if request.rules.grammar:
            self._compiling[group] = self._tools.grammars.compile(request.rules.grammar)
        else:
            self._enqueue(group, None)
        group.ledger.note("queued", group.arrival, group.num_prompt)
        self._ordinal += 1
        self._next_handle += request.sampling.n
        self._groups[request.request_id] = group
        return group.handle

    def _enqueue(self, group: Group, matcher: Matcher | None) -> None:
        pacer = make_pacer(group, self._tools, matcher)
        add_sequences(group, self._scheduler.new_table, pacer)
        self._scheduler.add(group)

    def abort(self, abort: Abort) -> None:
        """End a request, or one sample of it, now. The terminal message comes with the next step. Idempotent.

        Samples that are ranked at the end have no index before: only the whole request can be ended.
        """
        group = self._groups.get(abort.request_id)
        if group is None:
            return
        ending: Ending = ("abort", None) if abort.stop_reason is None else ("stop", abort.stop_reason)
        if group.search is not None or not group.live:
            if abort.index is None:
                self._close_search(group, ending)
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
        """Why no more requests are taken; None while the engine lives."""
        return self._dead

    @property
    def has_work(self) -> bool:
        """True while a request is live, a message is unsaid, a step is in flight or a tier is to be written to."""
        has_orders = self._dead is None and self._scheduler.tiers.has_orders
        return bool(self._groups or self._finished or len(self._pipeline) or has_orders)

    @property
    def pins(self) -> Pins:
        """The prompts that stay resident."""
        return self._scheduler.pins

    def unpin(self, salt: str, name: str) -> bool:
        """Let go of a resident prompt; False if there is none of that name."""
        return self.pins.remove(salt, name)

    def leisure(self) -> float:
        """Seconds for which `step` need not be called: who submits until then is computed as soon as by calling now."""
        return 0.0 if self._finished else self._pipeline.leisure()

    # ---------------------------------------------------------------------------------------------------- steps
    def step(self) -> TokensOut:
        """Advance by one step and return all there is to say. Blocks until the oldest step in flight is done."""
        batch = NOTHING
        try:
            if self._compiling:
                self._take_compiled()
            if self._scheduler.tiers.wants_report:
                self._scheduler.tiers.take_report(self._executor.transfers())
            self._pipeline.fill(self._prepare)
            if len(self._pipeline):
                batch = self._commit(*self._pipeline.collect())
            elif self._compiling:
                self._tools.grammars.wait(_COMPILING_SECONDS)
            elif self._groups:
                time.sleep(_FETCHING_SECONDS)
            if not self._groups:
                self._scheduler.check_idle()
        except Exception as error:  # noqa: BLE001 - whatever it was, every request must hear of it
            self._die(error)
        finished, self._finished = tuple(self._finished), []
        best = self._paced.take_best() if self._paced.best else ()
        return TokensOut(self._counters.steps, *batch, finished, best)

    def _take_compiled(self) -> None:
        """Groups whose grammar is compiled join the queue."""
        for group, compilation in list(self._compiling.items()):
            if not compilation.is_ready:
                continue
            try:
                self._enqueue(group, compilation.matcher(group.request.rules))
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(group, fault_of(error))
            else:
                del self._compiling[group]

    def _prepare(self) -> Flight | None:
        plan = None if self._dead else self._scheduler.plan(self._clock())
        flight = None if plan is None else self._make_flight(plan)
        if self._scheduler.paced.faults:
            for group, fault in self._scheduler.paced.take_faults():
                self._fail(group, fault)
        return flight

    def _make_flight(self, plan: StepPlan) -> Flight:
        """Count a step; note whose samples it will bring, and who waits for them."""
        self._counters.note_plan(plan)
        book, rows = self._scheduler.rows, self._scheduler.ahead_rows
        if not plan.chunks and not plan.new_rows and len(rows) == len(plan.decode_rows):
            return Flight(plan, rows, self._gather(rows).leases, book.version, {}, self._clock())
        paced, ahead, places = find_awaited(plan, len(rows), book)
        if ahead:
            rows = np.concatenate([rows, np.array(ahead, dtype=np.int32)])
        noted = [chunk.row for chunk in plan.chunks] + [new.row for new in plan.new_rows]
        other_leases = {row: int(book.leases[row]) for row in noted} | {each.row: each.lease for each in paced}
        leases = self._gather(rows).leases
        return Flight(plan, rows, leases, book.version, other_leases, self._clock(), places, paced)

    def _gather(self, rows: Ints) -> Gathered:
        """The book's entries for `rows`, kept while neither changes: the rule in steady decoding."""
        book = self._scheduler.rows
        if self._gathered.rows is not rows or self._gathered.version != book.version:
            self._gathered = Gathered.of(rows, book)
        return self._gathered

    def _commit(self, flight: Flight, result: StepResult) -> Batch:
        """Take in what a step produced, as far as it is still awaited, and end what it ended."""
        for failure in result.failures:
            if (sequence := self._awaited(flight.lease_of(failure.row), failure.row)) is not None:
                self._fail(sequence.group, Fault(failure.reason))
        book = self._scheduler.rows
        rows, tokens = flight.rows, result.token_ids if flight.places is None else result.token_ids[flight.places]
        if book.version != flight.version:
            awaited = book.leases[rows] == flight.leases
            if not awaited.all():
                rows, tokens = rows[awaited], tokens[awaited]
        if flight.plan.chunks:
            self._note_first_tokens(flight)
        gathered = self._gather(rows)
        counts = book.record(rows, tokens)
        judged = self._paced.judge(flight, result) if flight.paced else []
        logprobs = self._take_logprobs(flight, result, judged) if result.logprobs or result.prompt_logprobs else ()
        is_plain = not judged and gathered.heard is None
        batch = (gathered.handles, tokens, logprobs) if is_plain else say(gathered, tokens, judged, logprobs)
        for position in find_ends(tokens, gathered.end_ids, counts, gathered.limits).tolist():
            ended = book.sequences[rows[position]]
            if ended is not None:
                self._end(ended, explain_end(int(tokens[position]), ended.group.request.rules))
        if judged or self._scheduler.paced.landing:
            self._paced.settle(judged)
            self._counters.output_tokens += sum(len(verdict.tokens) for _, verdict in judged)
        now = self._clock()
        self._counters.note_step(now - flight.launched, len(tokens))
        since, self._last_commit = max(flight.launched, self._last_commit), now
        if flight.plan.num_tokens:
            self._scheduler.note_step(flight.plan, now - since)
            self._tools.lookaheads.note_step(flight.plan.num_tokens, flight.num_samples, now - since)
        return batch

    def _note_first_tokens(self, flight: Flight) -> None:
        now = self._clock()
        for row in [row for chunk in flight.plan.chunks for row in chunk.sample_rows]:
            sequence = self._awaited(flight.lease_of(row), row)
            if sequence is not None and not sequence.group.has_token:
                sequence.group.has_token = True
                sequence.group.ledger.note("first_token", now)

    def _take_logprobs(
        self, flight: Flight, result: StepResult, judged: list[Judged]
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        leases = dict(zip(flight.rows.tolist(), flight.leases.tolist(), strict=True)) | flight.other_leases
        left = {sequence: len(verdict.tokens) for sequence, verdict in judged}  # of a draft only what was right counts
        taken = []
        for item in result.logprobs:
            sequence = self._awaited(leases.get(item.row), item.row)
            if sequence is None or sequence.group.search is not None or left.get(sequence) == 0:
                continue
            if sequence in left:
                left[sequence] -= 1
            sequence.logprobs.append(item.entry)
            sequence.logprob_sum += float(item.entry.logprobs[0])
            if not sequence.group.is_ranked:
                taken.append((sequence.handle, item.entry))
        for prompt in result.prompt_logprobs:
            if (sequence := self._awaited(leases.get(prompt.row), prompt.row)) is not None:
                sequence.group.prompt_logprobs.update(enumerate(prompt.entries, prompt.start))
        return tuple(taken)

    def _awaited(self, lease: int | None, row: int) -> Sequence | None:
        """Who sits in a row, if it is still the one the lease was given to."""
        book = self._scheduler.rows
        return book.sequences[row] if lease == book.leases[row] else None

    # ------------------------------------------------------------------------------------------------------ ends
    def _end(self, sequence: Sequence, ending: Ending) -> None:
        """End one sample; with the last one, its request. What goes wrong here is that request's error alone."""
        group = sequence.group
        try:
            group.end(sequence, self._scheduler.end(sequence), *ending)
            if not group.live:
                self._dismiss(group, group.farewell(self._clock()))
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self._fail(group, fault_of(error))

    def _close_search(self, group: Group, cut_off: Ending | None = None) -> None:
        """End a beam search, or a group that has no sequences yet: `cut_off` says why, if it is not over by itself."""
        if group.live:
            group.ended.extend(beam_ends(group, cut_off))
        elif cut_off is not None:
            group.ended.extend(SampleEnd(index, (), *cut_off) for index in range(group.request.sampling.n))
        self._clear(group)
        self._dismiss(group, group.farewell(self._clock()))

    def _fail(self, group: Group, fault: Fault) -> None:
        """End a whole request with an error, keeping what it had generated."""
        if group.request.request_id not in self._groups:
            return
        if group.search is not None and group.live:
            group.ended.append(SampleEnd(0, tuple(group.leader.outputs), "error"))
            self._clear(group)
        for sequence in list(group.live):
            group.end(sequence, self._scheduler.end(sequence, keep=False), "error", None)
        try:
            message = group.farewell(self._clock(), *fault)
        except Exception:  # noqa: BLE001 - the farewell itself may be what failed; the request must end all the same
            message = Finished(group.request.request_id, tuple(group.ended), error=fault.reason)
        self._dismiss(group, message)

    def _clear(self, group: Group) -> None:
        """End a search's beams: what they say is noted already."""
        for sequence in group.live:
            self._scheduler.end(sequence, keep=False)
        group.live.clear()

    def _dismiss(self, group: Group, message: Finished) -> None:
        if self._compiling.pop(group, None) is None:
            self._scheduler.remove(group)
        del self._groups[group.request.request_id]
        if group.request.pin:
            self.pins.settle(group.request, message)
        self._finished.append(message)
        self._counters.finished += 1

    def _die(self, error: Exception) -> None:
        """The executor is lost: every request ends with an error, and no more are taken."""
        self._dead = f"the engine stopped: {error!r}"
        self._pipeline.clear()
        for group in list(self._groups.values()):
            self._fail(group, Fault(self._dead))

    # --------------------------------------------------------------------------------------------------- condition
    def stats(self) -> EngineStats:
        return self._counters.stats(self._scheduler, self._paced, self._cache)

    def block_map(self) -> BlockMap:
        """Who holds which block now, waiting requests included."""
        pool, requests = self._scheduler.pool, self._scheduler.request_blocks()
        return BlockMap(self._counters.steps, self._cache.block_size, pool.all_holders(), requests, pool.idle_blocks())

    def reset_cache(self) -> int:
        """Forget cached prefixes, those of running requests too; returns how many blocks that freed."""
        return self._scheduler.reset_cache()

    def check(self) -> None:
        """Assert that all owners agree; when idle, that nothing is held."""
        self._scheduler.check()
        assert set(self._groups.values()) == {*self._scheduler.running, *self._scheduler.waiting, *self._compiling}
        if not self._groups:
            assert self._scheduler.pool.num_used == self.pins.num_blocks

    def close(self) -> None:
        """Have the tiers written to as far as was decided, and give the executor's devices back. Idempotent."""
        if not self._groups and self.has_work:
            self.step()
        self._tools.grammars.close()
        self._executor.close()
