"""Turns the engine's tokens into text on the link's thread and puts them into mailboxes. Notifies the event loop once
per batch."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from quire.serving.dispatch.in_flight_request import Follower, InFlightRequest
from quire.serving.dispatch.mailbox import Delta, Mailbox
from quire.serving.dispatch.observer import Observer
from quire.serving.outputs import logprobs_by_handle
from quire.serving.process.link import EngineLink, EngineReady
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.output import Finished, TokensOut
from quire.types.request import Abort
from quire.types.step import TokenLogprobs

logger = logging.getLogger("quire.edge")


@dataclass(slots=True)
class BatchUpdate:
    """The work that one batch of tokens leaves for the event loop."""

    mailboxes: set[Mailbox] = field(default_factory=set)  # their handlers are to be woken
    started: list[InFlightRequest] = field(default_factory=list)  # restarted, and have a first token now
    finished: list[InFlightRequest] = field(default_factory=list)
    overflowed: list[InFlightRequest] = field(default_factory=list)  # their mailboxes are above stream_bytes
    broken: list[InFlightRequest] = field(default_factory=list)  # detokenizing their tokens raised an exception

    def __bool__(self) -> bool:
        return bool(self.mailboxes or self.started or self.finished or self.overflowed or self.broken)


class LoopPort(Protocol):
    """Posts events from the link's thread to the event loop. No method blocks."""

    def post_batch(self, update: BatchUpdate) -> None: ...

    def post_refused(self, request: InFlightRequest, error: InvalidRequest) -> None: ...

    def post_engine_up(self, ready: EngineReady) -> None: ...

    def post_engine_down(self, lost: list[InFlightRequest], reason: str) -> None: ...


class TokenRouter:
    """An EngineListener that routes tokens to the requests registered with `expect`. Tokens of other requests are
    dropped."""

    def __init__(
        self, link: EngineLink, tokenizer: Tokenizer, loop: LoopPort, observer: Observer, stream_bytes: int
    ) -> None:
        self._link, self._tokenizer, self._loop, self._observer = link, tokenizer, loop, observer
        self._stream_bytes = stream_bytes
        self._expected: dict[str, InFlightRequest] = {}
        self._followers: dict[int, Follower] = {}  # by sample handle
        self._searches: dict[
            int, InFlightRequest
        ] = {}  # beam searches that stream their best answer so far, by first handle
        self._unstarted: dict[int, InFlightRequest] = {}  # requests that have not produced a token, by first handle
        self._lock = threading.Lock()  # both threads change _expected

    def expect(self, request: InFlightRequest) -> None:
        """Register a request. The event loop calls it before it submits the request."""
        with self._lock:
            self._expected[request.submit.request_id] = request

    def forget(self, request: InFlightRequest) -> None:
        """Undo `expect` for a request that could not be submitted."""
        with self._lock:
            self._expected.pop(request.submit.request_id, None)

    # --------------------------------------------------------------------------------------------- EngineListener
    def engine_up(self, ready: EngineReady) -> None:
        self._loop.post_engine_up(ready)

    def engine_down(self, reason: str) -> None:
        with self._lock:
            lost = list(self._expected.values())
            self._expected.clear()
        self._followers.clear()
        self._searches.clear()
        self._unstarted.clear()
        self._loop.post_engine_down(lost, reason)

    def accepted(self, request_id: str, handle: int) -> None:
        request = self._expected.get(request_id)
        if request is None:
            self._link.abort(Abort(request_id))
            return
        self._unstarted[handle] = request
        for follower in request.follow(self._tokenizer, handle):
            self._followers[handle + follower.index] = follower
        if request.submit.beam is not None and request.submit.beam.stream_best:
            self._searches[handle] = request

    def refused(self, request_id: str, error: InvalidRequest) -> None:
        request = self._forget(request_id)
        if request is not None:
            self._loop.post_refused(request, error)

    def tokens(self, batch: TokensOut) -> None:
        update, now = BatchUpdate(), time.monotonic()
        if self._unstarted and len(batch.samples):
            self._note_started(batch, update)
        if self._followers and len(batch.samples):
            self._follow(batch, update, now)
        for handle, token_ids in batch.best if self._searches else ():
            self._show_best(handle, token_ids.tolist(), update)
        for finished in batch.finished:
            request = self._forget(finished.request_id)
            if request is not None:
                self._finish(request, finished, update)
        if update:
            self._loop.post_batch(update)

    # -------------------------------------------------------------------------------------------- internals
    def _finish(self, request: InFlightRequest, finished: Finished, update: BatchUpdate) -> None:
        update.finished.append(request)
        try:
            request.finish(finished, self._tokenizer)
        except Exception:
            logger.exception("request %s: the end of its text could not be made", finished.request_id)
            update.broken.append(request)

    def _note_started(self, batch: TokensOut, update: BatchUpdate) -> None:
        """Mark the requests of this batch that produced their first token."""
        for handle in self._unstarted.keys() & batch.samples.tolist():
            request = self._unstarted.pop(handle)
            request.has_started = True
            if request.restarts:
                update.started.append(request)

    def _show_best(self, handle: int, token_ids: list[int], update: BatchUpdate) -> None:
        """Put the best answer so far of a beam search into its mailbox."""
        request = self._searches.get(handle)
        if request is None or request.state == "over":
            return
        text = self._tokenizer.decode(token_ids, request.submit.sampling.skip_special_tokens)
        request.mailbox.put(Delta(request.first_choice, "", best=text))
        if request.mailbox.pending_bytes > self._stream_bytes:
            update.overflowed.append(request)
        update.mailboxes.add(request.mailbox)

    def _follow(self, batch: TokensOut, update: BatchUpdate, now: float) -> None:
        """Pass the tokens of a batch to their followers, and report the batch to the observer."""
        entries = logprobs_by_handle(batch.logprobs) if batch.logprobs else {}
        followers, intervals = self._followers, []
        for handle, token_id in zip(batch.samples.tolist(), batch.token_ids.tolist(), strict=True):
            follower = followers.get(handle)
            if follower is None or follower.request.state == "over":
                continue
            entry = entries[handle].pop(0) if entries.get(handle) else None
            try:
                self._push(follower, token_id, entry, update)
            except Exception:
                logger.exception("request %s: its text could not be made", follower.request.submit.request_id)
                update.broken.append(follower.request)
                follower.is_over = True
            if follower.last_at is not None:
                intervals.append(now - follower.last_at)
            elif follower.request.record.first_token_at is None:
                follower.request.record.first_token_at = now
                if follower.request.record.streamed:
                    self._observer.first_token(follower.request.record)
            follower.last_at = now
            if follower.is_over:
                del followers[handle]
        self._observer.tokens(len(batch.samples), intervals)

    def _push(self, follower: Follower, token_id: int, entry: TokenLogprobs | None, update: BatchUpdate) -> None:
        """Pass one token to its follower, release deltas that are due, and abort the sample in the engine if its text
        ended it."""
        request = follower.request
        delta = follower.push(token_id, entry)
        if request.streams and follower.hold(delta):
            if follower.is_unread and request.mailbox.pending_bytes > self._stream_bytes:
                update.overflowed.append(request)
            follower.release()
            update.mailboxes.add(request.mailbox)
        if follower.is_over:
            self._link.abort(Abort(request.submit.request_id, follower.index, follower.text.stopped_by))

    def _forget(self, request_id: str) -> InFlightRequest | None:
        with self._lock:
            request = self._expected.pop(request_id, None)
        if request is not None and request.handle is not None:
            self._searches.pop(request.handle, None)
            self._unstarted.pop(request.handle, None)
        if request is not None and request.handle is not None and request.followers:
            for index in range(request.n):
                self._followers.pop(request.handle + index, None)
        return request
