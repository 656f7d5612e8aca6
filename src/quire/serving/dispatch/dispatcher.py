"""Queues the requests of one edge, submits them to the engine in order, and ends each of them exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from quire.serving.dispatch.engine_capacity import EngineCapacity
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Failure, StreamThrottle
from quire.serving.dispatch.observer import Observer
from quire.serving.dispatch.quarantine import Quarantine
from quire.serving.dispatch.request_queue import RequestQueue
from quire.serving.dispatch.retries import RetryQueue
from quire.serving.dispatch.token_router import BatchUpdate, TokenRouter
from quire.serving.outputs import request_fault
from quire.serving.process.edge_loads import EdgeLoadTable
from quire.serving.process.link import EngineLink, EngineReady
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.request import Abort

logger = logging.getLogger("quire.edge")

POLL_SECONDS = 0.01  # while requests are queued: how often to check the engine's backlog and the load of other edges
LONGEST_RETRY = 60  # seconds: the largest Retry-After of QueueFull
DRAIN_GRACE = 0.5  # seconds for handlers to write error responses after a drain has timed out
AbortKind = Literal["admin", "drain", "timeout", "queue_timeout"]


class QueueFull(QuireError):
    """The queue is full. `retry_after` is the estimated wait in whole seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is full: too many requests wait for the engine")
        self.retry_after = retry_after


class Draining(QuireError):
    """The server is shutting down and accepts no new requests."""


def _do_nothing() -> None:
    """Default of `Dispatcher.on_engine_up`."""


class Dispatcher:
    """Holds requests in a queue, submits as many as the engine can use, and ends each of them exactly once: when the
    engine finishes it, when it fails, or when it is cancelled.

    The event loop calls all methods except `post_*`, which the link's thread calls.
    """

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        limits: Mapping[str, int],
        observer: Observer,
        num_workers: int = 1,
        edge_loads: EdgeLoadTable | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._link, self._observer = link, observer
        self.edge_loads = edge_loads or EdgeLoadTable()
        self._capacity = EngineCapacity(link, self.edge_loads, num_workers)
        self._quarantine = quarantine or Quarantine(limits["quarantine_seconds"])
        self._retries = RetryQueue(self.edge_loads)
        self._poll: asyncio.TimerHandle | None = None
        self._max_waiting = limits["queue_requests"]  # bounds the sum over all edges, as queue_tokens does
        self._queue = RequestQueue(self._max_waiting, limits["queue_tokens"])
        self._throttle = StreamThrottle(self._loop, limits["coalesce_streams"], limits["coalesce_ms"] / 1_000)
        self._router = TokenRouter(link, tokenizer, self, observer, limits["stream_bytes"])
        self._in_engine: dict[str, InFlightRequest] = {}  # by the engine's request id
        self._num_accepted = self._num_preparing = self._num_streams = 0
        self._ends: deque[float] = deque(maxlen=64)  # when the last requests ended, by the monotonic clock
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False
        self.engine: EngineReady | None = None  # None: the engine is down
        self.known_engine: EngineReady | None = None  # the last engine that came up; None: none yet
        self.on_engine_up: Callable[[], None] = _do_nothing

    def start(self) -> None:
        self._link.start(self._router)

    # -------------------------------------------------------------------------------------- called by handlers
    @contextmanager
    def accept(self) -> Iterator[None]:
        """Count one HTTP request as being handled while the block runs; `drain` waits for it. Raises QueueFull or
        Draining."""
        if self.is_draining:
            raise Draining("the server is shutting down")
        if self.num_waiting + self.edge_loads.elsewhere()[0] >= self._max_waiting:
            raise QueueFull(self._retry_after())
        self._num_accepted += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_accepted -= 1
            if not self._num_accepted:
                self._empty.set()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count one request as waiting while the block validates and tokenizes it. Do not read the body inside the
        block: a slow client would occupy a place in the queue."""
        self._num_preparing += 1
        self._publish()
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._publish()

    def enqueue(self, requests: Sequence[InFlightRequest]) -> None:
        """Queue the requests of one HTTP request, and submit as many queued requests as the engine has capacity for.
        Raises QueueFull or Quarantined, and then queues none of them."""
        for request in requests:
            self._quarantine.check(request.submit)
        waiting = self.has_queue or not self._has_capacity(sum(request.num_sequences for request in requests))
        tokens = sum(request.weight for request in requests)
        if waiting and not self._queue.has_room(len(requests), tokens, self.edge_loads.elsewhere()):
            raise QueueFull(self._retry_after())
        now = time.monotonic()
        for request in requests:
            request.state, request.record.queued_at = "queued", now
            self._queue.add(request)
            self._num_streams += request.streams
            self._observer.queued(request.record)
        self._submit_next()

    def cancel(self, requests: Iterable[InFlightRequest], reason: str = "client") -> None:
        """End these requests, whether queued or in the engine. Requests that have ended already are skipped."""
        for request in requests:
            self._throttle.forget(request.mailbox)
            if request.state == "queued":
                self._queue.remove(request)
                self._retries.remove(request)
            elif request.state == "submitted":
                self._link.abort(Abort(request.submit.request_id))
            else:
                continue
            self._mark_over(request)
            logger.info("request %s ended: %s", request.submit.request_id, reason)
            self._observer.aborted(request.record, reason)
        self._submit_next()

    def abort(self, request_ids: Iterable[str] | None, kind: AbortKind = "admin") -> int:
        """End requests with an error of this kind: those with these engine request ids, or all if None. Returns how
        many were ended."""
        wanted = None if request_ids is None else set(request_ids)
        found = [one for one in self.requests() if wanted is None or one.submit.request_id in wanted]
        for request in found:
            request.mailbox.fail(Failure(kind))
        self.cancel(found, kind)
        return len(found)

    def requests(self) -> list[InFlightRequest]:
        """Return all requests that are queued or in the engine and have not ended."""
        inside = [one for one in self._in_engine.values() if one.state == "submitted"]
        return [*inside, *self._retries, *self._queue]

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and wait for the accepted ones. After `seconds`, end the rest with an error."""
        self.is_draining = True
        self._publish()
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.abort(None, "drain")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), DRAIN_GRACE)

    @property
    def has_queue(self) -> bool:
        """Whether any request is queued here, to be submitted for the first time or again."""
        return len(self._queue) > 0 or len(self._retries) > 0

    @property
    def num_waiting(self) -> int:
        """Requests that are queued here or are being prepared (see `preparing`)."""
        return len(self._queue) + len(self._retries) + self._num_preparing

    @property
    def num_in_engine(self) -> int:
        return len(self._in_engine)

    # ------------------------------------------------------------------------------- called by the link's thread
    def post_batch(self, update: BatchUpdate) -> None:
        self._loop.call_soon_threadsafe(self._on_batch, update)

    def post_refused(self, request: InFlightRequest, error: InvalidRequest) -> None:
        self._loop.call_soon_threadsafe(self._on_refused, request, error)

    def post_engine_up(self, ready: EngineReady) -> None:
        self._loop.call_soon_threadsafe(self._on_engine_up, ready)

    def post_engine_down(self, lost: list[InFlightRequest], reason: str) -> None:
        self._loop.call_soon_threadsafe(self._on_engine_down, lost, reason)

    # ----------------------------------------------------------------------------------------- on the event loop
    def _on_batch(self, update: BatchUpdate) -> None:
        mailboxes = update.mailboxes
        for request in update.started:
            self._retries.remove(request)
        for request in update.broken:
            if request.state != "over":
                request.mailbox.fail(Failure("engine_error"))
                self.cancel([request], "error")
        for request in update.finished:
            self._remove_from_engine(request)
            if request.state == "over":
                continue
            self._mark_over(request)
            self._close_record(request)
            mailboxes.add(request.mailbox)
            assert request.finished is not None
            if request.finished.error is not None:
                logger.error("request %s: %s", request.submit.request_id, request.finished.error)
                fault = request_fault(request.finished)
                request.mailbox.fail(Failure("engine_error") if fault is None else Failure("refused", fault))
            else:
                self._quarantine.clear(request.submit)
        for request in update.overflowed:
            if request.state != "over":
                request.mailbox.fail(Failure("slow_reader"))
                self.cancel([request], "slow_reader")
        self._throttle.deliver(mailboxes, self._num_streams)
        if update.finished or update.started:
            self._submit_next()

    def _on_refused(self, request: InFlightRequest, error: InvalidRequest) -> None:
        self._remove_from_engine(request)
        if request.state != "over":
            self._mark_over(request)
            self._observer.aborted(request.record, "refused")
            request.mailbox.fail(Failure("refused", error))
        self._submit_next()

    def _on_engine_up(self, ready: EngineReady) -> None:
        self.engine = self.known_engine = ready
        self._capacity.reset()
        self._queue.order.by_tenant, self._queue.order.ageing = ready.policy == "fair", ready.ageing
        self._observer.engine_up(ready.generation)
        try:
            self.on_engine_up()
        except Exception:
            logger.exception("on_engine_up failed for a new engine; requests are still served")
        self._loop.call_soon(self._submit_next)  # after the callback has queued its own requests

    def _on_engine_down(self, lost: list[InFlightRequest], reason: str) -> None:
        lost = [request for request in lost if request.state != "queued"]  # queued: `submit` failed, it stays queued
        logger.error("the engine is down: %s; %d requests were in it, %d wait", reason, len(lost), len(self._queue))
        crashed, self.engine = self.engine, None
        self._observer.engine_down()
        if crashed is not None:  # else the engine was down already, and these requests never reached it
            suspects = self._retries.suspects(lost)
            self._quarantine.add_crash((request.submit for request in suspects), crashed.generation)
            for request in suspects:
                request.num_crashes += 1
        for request in lost:
            self._remove_from_engine(request)
            if request.state == "over":
                continue
            self._link.abort(Abort(request.submit.request_id))  # it may have reached the next engine already
            if request.can_restart:
                self._restart(request, reason)
            else:
                self._give_up(request)
        self._publish()

    def _restart(self, request: InFlightRequest, reason: str) -> None:
        """Queue a request again for the next engine. Nothing of its response has been delivered."""
        logger.warning("request %s is submitted again: %s", request.submit.request_id, reason)
        self._retries.add(request)
        request.restart(time.monotonic())
        self._observer.resubmitted(request.record)

    def _give_up(self, request: InFlightRequest) -> None:
        """End a request with an error because it cannot be submitted again or is quarantined."""
        seconds = self._quarantine.seconds_left(request.submit)
        kind: Literal["engine_down", "quarantined"] = "engine_down" if seconds is None else "quarantined"
        self._mark_over(request)
        self._observer.aborted(request.record, kind)
        request.mailbox.fail(Failure(kind, retry_after=seconds))
        if seconds is not None:
            logger.error("request %s is quarantined: the engine died with it twice", request.submit.request_id)

    def _submit_next(self) -> None:
        """Submit requests while the engine has capacity: first those of the retry queue, then those of the queue."""
        while self.engine is not None and (request := self._next_request()) is not None:
            if self._is_quarantined(request):
                continue
            if not self._has_capacity(request.num_sequences):
                break
            request.record.submitted_at = time.monotonic()
            self._router.expect(request)
            try:
                self._link.submit(request.submit)
            except EngineDead:  # the request stays queued and is submitted to the next engine
                self._router.forget(request)
                request.record.submitted_at = None
                break
            if request in self._retries:
                self._retries.start(request)
            self._queue.remove(request)
            request.state = "submitted"
            self._in_engine[request.submit.request_id] = request
            self._capacity.add(request)
            self._observer.submitted(request.record)
        self._publish()
        if self.engine is not None and self.has_queue and self._poll is None:
            self._poll = self._loop.call_later(POLL_SECONDS, self._check_capacity)

    def _next_request(self) -> InFlightRequest | None:
        """Return the request to submit next. Returns None while a retried request runs alone: if the engine crashed
        with two requests, either could be to blame."""
        return None if self._retries.is_trying else self._retries.first() or self._queue.first()

    def _check_capacity(self) -> None:
        """Check capacity again: the engine or another edge frees capacity without notifying this edge."""
        self._poll = None
        self._submit_next()

    def _is_quarantined(self, request: InFlightRequest) -> bool:
        """Whether the content of this request was quarantined while it was queued. If so, also end it with an error."""
        if self._quarantine.seconds_left(request.submit) is None:
            return False
        self._queue.remove(request)
        self._retries.remove(request)
        self._give_up(request)
        return True

    def _publish(self) -> None:
        self.edge_loads.put(
            len(self._queue) + len(self._retries),
            self._queue.num_tokens + self._retries.num_tokens,
            len(self._in_engine),
            self._capacity.num_sequences,
            preparing=self._num_preparing,
            retrying=self._retries.tried is not None,
            draining=self.is_draining,
        )

    def _has_capacity(self, num_sequences: int) -> bool:
        return self.engine is not None and self._capacity.has_room(self.engine, num_sequences)

    def _remove_from_engine(self, request: InFlightRequest) -> None:
        self._retries.remove(request)
        if self._in_engine.pop(request.submit.request_id, None) is not None:
            self._capacity.remove(request)

    def _mark_over(self, request: InFlightRequest) -> None:
        """Mark a request as ended for its client. The engine may hold it until the abort is confirmed."""
        request.state = "over"
        request.mailbox.num_open -= 1
        self._num_streams -= request.streams
        request.record.finished_at = time.monotonic()
        self._ends.append(request.record.finished_at)

    def _close_record(self, request: InFlightRequest) -> None:
        """Complete the record of a finished request and report it to the observer. Exceptions are logged: they must not
        affect the other requests of the batch."""
        try:
            self._fill_record(request)
            self._observer.finished(request.record)
        except Exception:
            logger.exception("request %s could not be recorded", request.submit.request_id)

    @staticmethod
    def _fill_record(request: InFlightRequest) -> None:
        finished, record = request.finished, request.record
        assert finished is not None
        assert record.finished_at is not None
        ends = [end for end, _ in request.ends()]
        record.num_output_tokens = sum(len(end.token_ids) for end in ends)
        record.num_cached_tokens, record.num_preemptions = finished.num_cached_tokens, finished.num_preemptions
        record.finish_reasons = tuple(end.finish_reason for end in ends)
        record.ledger = finished.ledger
        if record.first_token_at is None:
            record.first_token_at = next((entry.at for entry in record.ledger if entry.kind == "first_token"), None)
        record.last_token_at = record.finished_at
        seconds, counts = record.finished_at - record.received_at, (record.num_prompt_tokens, record.num_output_tokens)
        logger.info("request %s: %d tokens in, %d out, %.3f s", record.request_id, *counts, seconds)

    def _retry_after(self) -> int:
        """Estimate, from the rate at which the last requests ended, in how many seconds as many requests will have
        ended as are queued now."""
        if len(self._ends) < 2 or (span := self._ends[-1] - self._ends[0]) <= 0:
            return 1
        return max(1, min(LONGEST_RETRY, round((len(self._queue) + 1) * span / (len(self._ends) - 1))))
