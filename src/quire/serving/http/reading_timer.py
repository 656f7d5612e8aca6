"""Ends connections whose clients read nothing of what waits to be sent."""

from __future__ import annotations

import asyncio


class ReadingTimer:
    """Cuts a connection off when of so many unsent bytes none are read for `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, seconds: float) -> None:
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Expect that the client reads what waits now, if anything does."""
        self.stop()
        if unsent := self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(self._seconds, self._check, unsent)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unsent: int) -> None:
        if self._transport.get_write_buffer_size() >= unsent:
            self._transport.abort()
        else:
            self.start()
