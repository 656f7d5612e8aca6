"""Closes connections whose clients do not read the data that waits to be sent."""

from __future__ import annotations

import asyncio


class ReadingTimer:
    """Closes a connection if none of the unsent bytes are read for `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, seconds: float) -> None:
        self._loop, self._transport, self._seconds = loop, transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, if any data is unsent."""
        self.stop()
        if unsent := self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(self._seconds, self._check, unsent)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unsent: int) -> None:
        """Close the connection if the client has read nothing since the timer was started, else start it again."""
        if self._transport.get_write_buffer_size() >= unsent:
            self._transport.abort()
        else:
            self.start()
