"""How often streams are written to: every step while they are few, at most every so many milliseconds when many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from quire.serving.desk.mailbox import Mailbox


class Pace:
    """Wakes the handlers of mailboxes that have news. With more than `max_streams` live streams, one stream is woken at
    most once per `gap` seconds, except for its first and its last news."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_streams: int, gap: float) -> None:
        self._loop, self._max_streams, self._gap = loop, max_streams, gap
        self._held: set[Mailbox] = set()
        self._timer: asyncio.TimerHandle | None = None

    def deliver(self, mailboxes: Iterable[Mailbox], num_streams: int) -> None:
        now = self._loop.time()
        gap = self._gap if num_streams > self._max_streams else 0.0
        for mailbox in mailboxes:
            if mailbox.woken_at is None or mailbox.is_over or now - mailbox.woken_at >= gap:
                self._held.discard(mailbox)
                mailbox.woken_at = now
                mailbox.wake()
            else:
                self._held.add(mailbox)
        if self._held and self._timer is None:
            self._arm()

    def forget(self, mailbox: Mailbox) -> None:
        """Its handler is leaving."""
        self._held.discard(mailbox)

    def _arm(self) -> None:
        due = min(mailbox.woken_at or 0.0 for mailbox in self._held) + self._gap
        self._timer = self._loop.call_at(due, self._release)

    def _release(self) -> None:
        self._timer = None
        now = self._loop.time()
        for mailbox in [held for held in self._held if now - (held.woken_at or 0.0) >= self._gap * 0.9]:
            self._held.discard(mailbox)
            mailbox.woken_at = now
            mailbox.wake()
        if self._held:
            self._arm()
