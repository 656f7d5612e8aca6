"""The desk: takes requests in, lets them into the engine in order, and sees that each of them ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from quire.serving.desk.board import Board
from quire.serving.desk.mailbox import Failure
from quire.serving.desk.observer import Observer
from quire.serving.desk.pace import Pace
from quire.serving.desk.reader import BatchNews, LinkReader
from quire.serving.desk.ticket import Ticket
from quire.serving.desk.waiting_room import WaitingRoom
from quire.serving.outputs import own_fault
from quire.serving.process.link import EngineLink, EngineReady
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest, QuireError
from quire.types.request import Abort

logger = logging.getLogger("quire.edge")

WINDOW = 2  # sequences let into the engine, in multiples of those it can run
LONGEST_RETRY = 60  # seconds
LAST_WORDS = 0.5  # seconds to write the errors that end a drain


class QueueFull(QuireError):
    """The waiting room is full. `retry_after` is a guess, in whole seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is full: too many requests wait for the engine")
        self.retry_after = retry_after


class Draining(QuireError):
    """The server is shutting down and takes no new work."""


def _nobody_waits() -> None:
    """Nothing is to be entered when an engine comes up."""


class Desk:
    """Belongs to the event loop, but for the `post_` methods, which the link's thread calls.

    Every ticket that was entered ends exactly once: by its engine's word, a failure, or its client's cancel.
    """

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        limits: Mapping[str, int],
        observer: Observer,
        num_workers: int = 1,
        board: Board | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._link, self._observer, self._num_workers = link, observer, num_workers
        self.board = board or Board()
        self._max_waiting = limits["queue_requests"]  # at all edges together, as is queue_tokens
        self._room = WaitingRoom(self._max_waiting, limits["queue_tokens"])
        self._pace = Pace(self._loop, limits["coalesce_streams"], limits["coalesce_ms"] / 1_000)
        self._reader = LinkReader(link, tokenizer, self, observer, limits["stream_bytes"])
        self._inside: dict[str, Ticket] = {}  # in the engine, by the engine's request id
        self._num_sequences = 0  # of them
        self._num_visits = self._num_preparing = self._num_streams = 0
        self._ends: deque[float] = deque(maxlen=64)
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False
        self.engine: EngineReady | None = None  # None: down
        self.known_engine: EngineReady | None = None  # the last that was up; None: there was none yet
        self.on_engine_up: Callable[[], None] = _nobody_waits

    def start(self) -> None:
        self._link.start(self._reader)

    # ------------------------------------------------------------------------------------------------- visitors
    @contextmanager
    def visit(self) -> Iterator[None]:
        """Around the whole handling of a request for generation. Raises QueueFull or Draining before any work."""
        if self.is_draining:
            raise Draining("the server is shutting down")
        if self.num_waiting + self.board.elsewhere()[0] >= self._max_waiting:
            raise QueueFull(self._retry_after())
        self._num_visits += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_visits -= 1
            if not self._num_visits:
                self._empty.set()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """While a request is checked and tokenized: it counts as waiting. Reading it does not, which clients decide."""
        self._num_preparing += 1
        self._publish()
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._publish()

    def enter(self, tickets: Sequence[Ticket]) -> None:
        """Queue the requests of one client and let in who may go. Raises QueueFull and queues none of them."""
        waiting = len(self._room) > 0 or not self._has_place(sum(ticket.num_sequences for ticket in tickets))
        tokens = sum(ticket.weight for ticket in tickets)
        if waiting and not self._room.has_room(len(tickets), tokens, self.board.elsewhere()):
            raise QueueFull(self._retry_after())
        now = time.monotonic()
        for ticket in tickets:
            ticket.state, ticket.record.queued_at = "queued", now
            self._room.add(ticket)
            self._num_streams += ticket.streams
            self._observer.queued(ticket.record)
        self._let_in()

    def leave(self, tickets: Iterable[Ticket], reason: str = "client") -> None:
        """Their client is done with them: whatever still waits or runs is ended. Idempotent."""
        for ticket in tickets:
            self._pace.forget(ticket.mailbox)
            if ticket.state == "queued":
                self._room.remove(ticket)
            elif ticket.state == "submitted":
                self._link.abort(Abort(ticket.submit.request_id))
            else:
                continue
            self._end(ticket)
            logger.info("request %s ended: %s", ticket.submit.request_id, reason)
            self._observer.aborted(ticket.record, reason)
        self._let_in()

    def abort(self, request_ids: Iterable[str] | None, kind: Literal["admin", "drain"] = "admin") -> int:
        """End requests with an error: those of these engine's ids, or all. Returns how many."""
        wanted = None if request_ids is None else set(request_ids)
        found = [t for t in self.tickets() if wanted is None or t.submit.request_id in wanted]
        for ticket in found:
            ticket.mailbox.fail(Failure(kind))
        self.leave(found, kind)
        return len(found)

    def tickets(self) -> list[Ticket]:
        """All that wait or run."""
        return [*(t for t in self._inside.values() if t.state == "submitted"), *self._room]

    async def drain(self, seconds: float) -> None:
        """Take no new work; return when nothing is left. What is not done in time ends with an error."""
        self.is_draining = True
        self._publish()
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.abort(None, "drain")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), LAST_WORDS)

    @property
    def num_waiting(self) -> int:
        return len(self._room) + self._num_preparing

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    # -------------------------------------------------------------------------------------- from the link's thread
    def post_batch(self, news: BatchNews) -> None:
        self._loop.call_soon_threadsafe(self._take_batch, news)

    def post_refused(self, ticket: Ticket, error: InvalidRequest) -> None:
        self._loop.call_soon_threadsafe(self._take_refused, ticket, error)

    def post_engine_up(self, ready: EngineReady) -> None:
        self._loop.call_soon_threadsafe(self._take_engine_up, ready)

    def post_engine_down(self, lost: list[Ticket], reason: str) -> None:
        self._loop.call_soon_threadsafe(self._take_engine_down, lost, reason)

    # ------------------------------------------------------------------------------------------------- the works
    def _take_batch(self, news: BatchNews) -> None:
        mailboxes = news.mailboxes
        for ticket in news.broken:
            if ticket.state != "over":
                ticket.mailbox.fail(Failure("engine_error"))
                self.leave([ticket], "error")
        for ticket in news.over:
            self._step_out(ticket)
            if ticket.state == "over":
                continue
            self._end(ticket)
            self._close_record(ticket)
            mailboxes.add(ticket.mailbox)
            assert ticket.finished is not None
            if ticket.finished.error is not None:
                logger.error("request %s: %s", ticket.submit.request_id, ticket.finished.error)
                fault = own_fault(ticket.finished)
                ticket.mailbox.fail(Failure("engine_error") if fault is None else Failure("refused", fault))
        for ticket in news.overflowed:
            if ticket.state != "over":
                ticket.mailbox.fail(Failure("slow_reader"))
                self.leave([ticket], "slow_reader")
        self._pace.deliver(mailboxes, self._num_streams)
        if news.over:
            self._let_in()

    def _take_refused(self, ticket: Ticket, error: InvalidRequest) -> None:
        self._step_out(ticket)
        if ticket.state != "over":
            self._end(ticket)
            self._observer.aborted(ticket.record, "refused")
            ticket.mailbox.fail(Failure("refused", error))
        self._let_in()

    def _take_engine_up(self, ready: EngineReady) -> None:
        self.engine = self.known_engine = ready
        self._room.turns.by_tenant, self._room.turns.ageing = ready.policy == "fair", ready.ageing
        self._observer.engine_up(ready.generation)
        self.on_engine_up()
        self._loop.call_soon(self._let_in)  # after what that enters

    def _take_engine_down(self, lost: list[Ticket], reason: str) -> None:
        logger.error("the engine is down: %s; %d requests were in it, %d wait", reason, len(lost), len(self._room))
        self.engine = None
        self._observer.engine_down()
        for ticket in lost:
            self._step_out(ticket)
            if ticket.state == "over":
                continue
            self._link.abort(Abort(ticket.submit.request_id))  # it may have reached the next engine already
            self._end(ticket)
            self._observer.aborted(ticket.record, "engine_down")
            ticket.mailbox.fail(Failure("engine_down"))
        self._publish()

    def _let_in(self) -> None:
        while (
            self.engine is not None
            and (ticket := self._room.first()) is not None
            and self._has_place(ticket.num_sequences)
        ):
            self._room.remove(ticket)
            ticket.state, ticket.record.submitted_at = "submitted", time.monotonic()
            self._inside[ticket.submit.request_id] = ticket
            self._num_sequences += ticket.num_sequences
            self._reader.expect(ticket)
            self._link.submit(ticket.submit)
            self._observer.submitted(ticket.record)
        self._publish()

    def _publish(self) -> None:
        self.board.put(self.num_waiting, self._room.num_tokens, len(self._inside), draining=self.is_draining)

    def _has_place(self, num_sequences: int) -> bool:
        if self.engine is None:
            return False
        share = WINDOW * self.engine.max_num_seqs // self._num_workers
        window = max(share, self.engine.max_num_seqs)  # clients may all have come to this edge
        return not self._inside or self._num_sequences + num_sequences <= window

    def _step_out(self, ticket: Ticket) -> None:
        """The engine holds it no more."""
        if self._inside.pop(ticket.submit.request_id, None) is not None:
            self._num_sequences -= ticket.num_sequences

    def _end(self, ticket: Ticket) -> None:
        """It is over for its client; in the engine it may live until the end is confirmed."""
        ticket.state = "over"
        ticket.mailbox.num_open -= 1
        self._num_streams -= ticket.streams
        ticket.record.finished_at = time.monotonic()
        self._ends.append(ticket.record.finished_at)

    def _close_record(self, ticket: Ticket) -> None:
        """Tell the observer how it went. What goes wrong here must not stop the other requests of a batch."""
        try:
            self._fill_record(ticket)
            self._observer.finished(ticket.record)
        except Exception:
            logger.exception("request %s could not be recorded", ticket.submit.request_id)

    @staticmethod
    def _fill_record(ticket: Ticket) -> None:
        finished, record = ticket.finished, ticket.record
        assert finished is not None
        assert record.finished_at is not None
        ends = [end for end, _ in ticket.ends()]
        record.num_output_tokens = sum(len(end.token_ids) for end in ends)
        record.num_cached_tokens, record.num_preemptions = finished.num_cached_tokens, finished.num_preemptions
        record.finish_reasons = tuple(end.finish_reason for end in ends)
        record.ledger = finished.ledger
        if record.first_token_at is None:
            record.first_token_at = next((entry.at for entry in finished.ledger if entry.kind == "first_token"), None)
        record.last_token_at = record.finished_at
        seconds, counts = record.finished_at - record.received_at, (record.num_prompt_tokens, record.num_output_tokens)
        logger.info("request %s: %d tokens in, %d out, %.3f s", record.request_id, *counts, seconds)

    def _retry_after(self) -> int:
        """Seconds until as many requests ended as wait now, judged by the last ones."""
        if len(self._ends) < 2 or (span := self._ends[-1] - self._ends[0]) <= 0:
            return 1
        return max(1, min(LONGEST_RETRY, round((len(self._room) + 1) * span / (len(self._ends) - 1))))
