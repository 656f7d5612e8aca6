"""One step = plan -> execute -> commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.admission import admit
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.stopping import explain_end, find_ends
from quire.engine.executor import Executor
from quire.engine.pipeline import Flight, Pipeline
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import Finished, FinishReason, TokensOut
from quire.types.request import Abort, Submit
from quire.types.stats import STEP_SIZES, BlockMap, BlockStats, EngineStats
from quire.types.step import NO_ROWS, Ints, StepResult, TokenLogprobs

Batch = tuple[npt.NDArray[np.int64], Ints, tuple[tuple[int, TokenLogprobs], ...]]  # sample handles, tokens, logprobs
_NOTHING: Batch = (np.empty(0, dtype=np.int64), NO_ROWS, ())
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment


class Gathered(NamedTuple):
    """The row book's columns for some rows, as of one version of the book."""

    rows: Ints
    version: int
    leases: npt.NDArray[np.int64]
    handles: npt.NDArray[np.int64]
    end_ids: Ints  # [rows, k]
    limits: Ints


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
        depth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._cache, self._config, self._vocab_size = executor, cache, scheduler, vocab_size
        self._scheduler = Scheduler(cache, scheduler)
        self._pipeline = Pipeline(executor, depth or executor.depth, clock)
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._gathered = Gathered(NO_ROWS, -1, _NOTHING[0], _NOTHING[0], NO_ROWS, NO_ROWS)
        self._finished: list[Finished] = []
        self._next_handle = 0
        self._ordinal = 0
        self._dead: str | None = None
        self._steps = self._num_finished = self._prompt_tokens = self._output_tokens = self._computed_tokens = 0
        self._steps_by_size = [0] * (len(STEP_SIZES) + 1)
        self._step_seconds = self._last_step_seconds = 0.0

    # ------------------------------------------------------------------------------------------------ requests
    def submit(self, request: Submit) -> int:
        """Accept a request; its sample i answers to the returned handle + i. Raises InvalidRequest or EngineDead."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if request.request_id in self._groups:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use", "choose another or wait for its end"
            )
        limit = admit(request, self._cache, self._config, self._vocab_size)
        handle, self._next_handle = self._next_handle, self._next_handle + request.sampling.n
        group = Group(request, self._ordinal, limit, self._seed_for(request))
        group.ledger.note("queued", self._clock(), group.num_prompt)
        self._ordinal += 1
        for index in range(request.sampling.n):
            group.live.append(Sequence(group, index, handle + index, self._scheduler.new_table()))
        self._groups[request.request_id] = group
        self._scheduler.add(group)
        return handle

    def abort(self, abort: Abort) -> None:
        """End a request, or one sample of it, now. The terminal message comes with the next step. Idempotent."""
        group = self._groups.get(abort.request_id)
        if group is None:
            return
        reason: FinishReason = "abort" if abort.stop_reason is None else "stop"
        for sequence in [s for s in group.live if abort.index in (None, s.index)]:
            self._end(sequence, reason, abort.stop_reason)

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
        """True while a request is live, a message is unsaid or a step is in flight."""
        return bool(self._groups or self._finished or len(self._pipeline))

    def leisure(self) -> float:
        """Seconds for which `step` need not be called: who submits until then is computed as soon as by calling now."""
        return 0.0 if self._finished else self._pipeline.leisure()

    # ---------------------------------------------------------------------------------------------------- steps
    def step(self) -> TokensOut:
        """Advance by one step and return all there is to say. Blocks until the oldest step in flight is done."""
        batch = _NOTHING
        try:
            self._pipeline.fill(self._prepare)
            if len(self._pipeline):
                batch = self._commit(*self._pipeline.collect())
            if not self._groups:
                self._scheduler.check_idle()
        except Exception as error:  # noqa: BLE001 - whatever it was, every request must hear of it
            self._die(error)
        finished, self._finished = tuple(self._finished), []
        return TokensOut(self._steps, *batch, finished)

    def _prepare(self) -> Flight | None:
        plan = self._scheduler.plan(self._clock())
        if plan is None:
            return None
        book, rows = self._scheduler.rows, plan.sample_rows
        noted = [chunk.row for chunk in plan.chunks] + [new.row for new in plan.new_rows]
        other_leases = {row: int(book.leases[row]) for row in noted}
        num_tokens = plan.num_tokens
        self._prompt_tokens += num_tokens - len(plan.decode_rows)
        self._computed_tokens += num_tokens
        self._steps_by_size[min(max(num_tokens - 1, 0).bit_length(), len(STEP_SIZES))] += 1
        return Flight(plan, rows, self._gather(rows).leases, book.version, other_leases, self._clock())

    def _gather(self, rows: Ints) -> Gathered:
        """The book's entries for `rows`, kept while neither changes: the rule in steady decoding."""
        book = self._scheduler.rows
        if self._gathered.rows is not rows or self._gathered.version != book.version:
            self._gathered = Gathered(
                rows, book.version, book.leases[rows], book.handles[rows], book.end_ids[rows], book.limits[rows]
            )
        return self._gathered

    def _commit(self, flight: Flight, result: StepResult) -> Batch:
        """Take in what a step produced, as far as it is still awaited, and end what it ended."""
        for failure in result.failures:
            if (sequence := self._awaited(flight.lease_of(failure.row), failure.row)) is not None:
                self._fail(sequence.group, failure.reason)
        book = self._scheduler.rows
        rows, tokens = flight.rows, result.token_ids
        if book.version != flight.version:
            awaited = book.leases[rows] == flight.leases
            if not awaited.all():
                rows, tokens = rows[awaited], tokens[awaited]
        if flight.plan.chunks:
            self._note_first_tokens(flight)
        gathered = self._gather(rows)
        counts = book.record(rows, tokens)
        logprobs = self._take_logprobs(flight, result) if result.logprobs or result.prompt_logprobs else ()
        for position in find_ends(tokens, gathered.end_ids, counts, gathered.limits).tolist():
            ended = book.sequences[rows[position]]
            if ended is not None:
                self._end(ended, *explain_end(int(tokens[position]), ended.group.request.rules))
        self._steps += 1
        self._output_tokens += len(tokens)
        self._last_step_seconds = self._clock() - flight.launched
        self._step_seconds += self._last_step_seconds
        return gathered.handles, tokens, logprobs

    def _note_first_tokens(self, flight: Flight) -> None:
        now = self._clock()
        for row in [row for chunk in flight.plan.chunks for row in chunk.sample_rows]:
            sequence = self._awaited(flight.lease_of(row), row)
            if sequence is not None and not sequence.group.has_token:
                sequence.group.has_token = True
                sequence.group.ledger.note("first_token", now)

    def _take_logprobs(self, flight: Flight, result: StepResult) -> tuple[tuple[int, TokenLogprobs], ...]:
        leases = dict(zip(flight.rows.tolist(), flight.leases.tolist(), strict=True)) | flight.other_leases
        taken = []
        for item in result.logprobs:
            if (sequence := self._awaited(leases.get(item.row), item.row)) is not None:
                sequence.logprobs.append(item.entry)
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
    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End one sample; with the last one, its request. What goes wrong here is that request's error alone."""
        group = sequence.group
        try:
            group.end(sequence, self._scheduler.end(sequence), reason, stop_reason)
            if not group.live:
                self._dismiss(group, group.farewell(self._clock()))
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self._fail(group, f"the request failed inside the engine: {error!r}")

    def _fail(self, group: Group, reason: str) -> None:
        """End a whole request with an error, keeping what it had generated."""
        if group.request.request_id not in self._groups:
            return
        for sequence in list(group.live):
            group.end(sequence, self._scheduler.end(sequence, keep=False), "error", None)
        try:
            message = group.farewell(self._clock(), reason)
        except Exception:  # noqa: BLE001 - the farewell itself may be what failed; the request must end all the same
            message = Finished(group.request.request_id, tuple(group.ended), error=reason)
        self._dismiss(group, message)

    def _dismiss(self, group: Group, message: Finished) -> None:
        self._scheduler.remove(group)
        del self._groups[group.request.request_id]
        self._finished.append(message)
        self._num_finished += 1

    def _die(self, error: Exception) -> None:
        """The executor is lost: every request ends with an error, and no more are taken."""
        self._dead = f"the engine stopped: {error!r}"
        self._pipeline.clear()
        for group in list(self._groups.values()):
            self._fail(group, self._dead)

    # --------------------------------------------------------------------------------------------------- condition
    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        blocks = BlockStats(
            total=pool.num_blocks,
            used=pool.num_used,
            shared=pool.num_shared,
            free=pool.num_free,
            slots_used=scheduler.slots_used(),
            slots_allocated=pool.num_used * self._cache.block_size,
            cached=pool.num_idle,
        )
        return EngineStats(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            finished=self._num_finished,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            step_seconds=self._step_seconds,
            last_step_seconds=self._last_step_seconds,
            blocks=blocks,
            computed_tokens=self._computed_tokens,
            steps_by_size=tuple(self._steps_by_size),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def block_map(self) -> BlockMap:
        """Who holds which block now, waiting requests included."""
        pool, requests = self._scheduler.pool, self._scheduler.request_blocks()
        return BlockMap(self._steps, self._cache.block_size, pool.all_holders(), requests, pool.idle_blocks())

    def reset_cache(self) -> int:
        """Forget cached prefixes, those of running requests too; returns how many blocks that freed."""
        return self._scheduler.reset_cache()

    def check(self) -> None:
        """Assert that all owners agree; when idle, that nothing is held."""
        self._scheduler.check()
        assert set(self._groups.values()) == {*self._scheduler.running, *self._scheduler.waiting}
        if not self._groups:
            assert self._scheduler.pool.num_used == 0

    def close(self) -> None:
        """Give the executor's devices back. Idempotent."""
        self._executor.close()

    def _seed_for(self, request: Submit) -> int:
        """The user's seed, or one drawn from the engine's seed and the order of arrival (splitmix64)."""
        if request.sampling.seed is not None:
            return request.sampling.seed
        mixed = (self._config.seed + (self._ordinal + 1) * _GOLDEN) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return mixed ^ (mixed >> 31)
