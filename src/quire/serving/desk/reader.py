"""The link's thread at work: tokens become text and find their mailboxes; the event loop is told once per batch."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from quire.serving.desk.mailbox import Delta, Mailbox
from quire.serving.desk.observer import Observer
from quire.serving.desk.ticket import Follower, Ticket
from quire.serving.process.link import EngineLink, EngineReady
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.output import Finished, TokensOut
from quire.types.request import Abort
from quire.types.step import TokenLogprobs

logger = logging.getLogger("quire.edge")


@dataclass(slots=True)
class BatchNews:
    """What one batch means for the event loop."""

    mailboxes: set[Mailbox] = field(default_factory=set)  # with deltas that are due
    over: list[Ticket] = field(default_factory=list)
    overflowed: list[Ticket] = field(default_factory=list)  # their clients read too slowly
    broken: list[Ticket] = field(default_factory=list)  # their text could not be made

    def __bool__(self) -> bool:
        return bool(self.mailboxes or self.over or self.overflowed or self.broken)


class DeskSide(Protocol):
    """How the link's thread reaches the event loop. Never blocks."""

    def post_batch(self, news: BatchNews) -> None: ...

    def post_refused(self, ticket: Ticket, error: InvalidRequest) -> None: ...

    def post_engine_up(self, ready: EngineReady) -> None: ...

    def post_engine_down(self, lost: list[Ticket], reason: str) -> None: ...


class LinkReader:
    """An EngineListener. Knows the requests the desk expects answers to; all others are none of its business."""

    def __init__(
        self, link: EngineLink, tokenizer: Tokenizer, desk: DeskSide, observer: Observer, stream_bytes: int
    ) -> None:
        self._link, self._tokenizer, self._desk, self._observer = link, tokenizer, desk, observer
        self._stream_bytes = stream_bytes
        self._expected: dict[str, Ticket] = {}
        self._followers: dict[int, Follower] = {}  # by sample handle
        self._searches: dict[int, Ticket] = {}  # whose best answer so far is watched, by the first handle
        self._lock = threading.Lock()  # around changes to _expected that two threads make

    def expect(self, ticket: Ticket) -> None:
        """Called by the event loop before it submits."""
        with self._lock:
            self._expected[ticket.submit.request_id] = ticket

    # --------------------------------------------------------------------------------------------- EngineListener
    def engine_up(self, ready: EngineReady) -> None:
        self._desk.post_engine_up(ready)

    def engine_down(self, reason: str) -> None:
        with self._lock:
            lost = list(self._expected.values())
            self._expected.clear()
        self._followers.clear()
        self._searches.clear()
        self._desk.post_engine_down(lost, reason)

    def accepted(self, request_id: str, handle: int) -> None:
        ticket = self._expected.get(request_id)
        if ticket is None:
            self._link.abort(Abort(request_id))
            return
        for follower in ticket.follow(self._tokenizer, handle):
            self._followers[handle + follower.index] = follower
        if ticket.submit.beam is not None and ticket.submit.beam.stream_best:
            self._searches[handle] = ticket

    def refused(self, request_id: str, error: InvalidRequest) -> None:
        ticket = self._forget(request_id)
        if ticket is not None:
            self._desk.post_refused(ticket, error)

    def tokens(self, batch: TokensOut) -> None:
        news, now = BatchNews(), time.monotonic()
        if self._followers and len(batch.samples):
            self._follow(batch, news, now)
        for handle, token_ids in batch.best if self._searches else ():
            self._show_best(handle, token_ids.tolist(), news)
        for finished in batch.finished:
            ticket = self._forget(finished.request_id)
            if ticket is not None:
                self._settle(ticket, finished, news)
        if news:
            self._desk.post_batch(news)

    # ------------------------------------------------------------------------------------------------- the works
    def _settle(self, ticket: Ticket, finished: Finished, news: BatchNews) -> None:
        news.over.append(ticket)
        try:
            ticket.settle(finished, self._tokenizer)
        except Exception:
            logger.exception("request %s: its end could not be told", finished.request_id)
            news.broken.append(ticket)

    def _show_best(self, handle: int, token_ids: list[int], news: BatchNews) -> None:
        ticket = self._searches.get(handle)
        if ticket is None or ticket.state == "over":
            return
        text = self._tokenizer.decode(token_ids, ticket.submit.sampling.skip_special_tokens)
        ticket.mailbox.put(Delta(ticket.first_choice, "", best=text))
        if ticket.mailbox.pending_bytes > self._stream_bytes:
            news.overflowed.append(ticket)
        news.mailboxes.add(ticket.mailbox)

    def _follow(self, batch: TokensOut, news: BatchNews, now: float) -> None:
        entries = _by_handle(batch.logprobs) if batch.logprobs else {}
        followers, intervals = self._followers, []
        for handle, token_id in zip(batch.samples.tolist(), batch.token_ids.tolist(), strict=True):
            follower = followers.get(handle)
            if follower is None or follower.ticket.state == "over":
                continue
            entry = entries[handle].pop(0) if entries.get(handle) else None
            try:
                self._push(follower, token_id, entry, news)
            except Exception:
                logger.exception("request %s: its text could not be made", follower.ticket.submit.request_id)
                news.broken.append(follower.ticket)
                follower.is_over = True
            if follower.last_at is not None:
                intervals.append(now - follower.last_at)
            elif follower.ticket.record.first_token_at is None:
                follower.ticket.record.first_token_at = now
                self._observer.first_token(follower.ticket.record)
            follower.last_at = now
            if follower.is_over:
                del followers[handle]
        self._observer.tokens(len(batch.samples), intervals)

    def _push(self, follower: Follower, token_id: int, entry: TokenLogprobs | None, news: BatchNews) -> None:
        ticket = follower.ticket
        delta = follower.push(token_id, entry)
        if ticket.streams:
            if follower.hold(delta):
                follower.release()
                news.mailboxes.add(ticket.mailbox)
            if ticket.mailbox.pending_bytes > self._stream_bytes:
                news.overflowed.append(ticket)
        if follower.is_over:
            self._link.abort(Abort(ticket.submit.request_id, follower.index, follower.text.stopped_by))

    def _forget(self, request_id: str) -> Ticket | None:
        with self._lock:
            ticket = self._expected.pop(request_id, None)
        if ticket is not None and ticket.handle is not None:
            self._searches.pop(ticket.handle, None)
        if ticket is not None and ticket.handle is not None and ticket.followers:
            for index in range(ticket.n):
                self._followers.pop(ticket.handle + index, None)
        return ticket


def _by_handle(logprobs: tuple[tuple[int, TokenLogprobs], ...]) -> dict[int, list[TokenLogprobs]]:
    entries: dict[int, list[TokenLogprobs]] = {}
    for handle, entry in logprobs:
        entries.setdefault(handle, []).append(entry)
    return entries
