"""Writes one streamed response, from its headers to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.http.errors import ApiError, as_failure
from quire.serving.http.exchange import PROBE, ClientGone, Exchange
from quire.serving.http.generation.job import Job
from quire.serving.http.generation.settings import StreamFormat


class EventStream:
    """Writes deltas as they arrive, and a ping whenever nothing was written for `ping_seconds`.

    A queued request gets headers and a ping at once. Otherwise nothing is sent before the first delta or ping, so that
    a request that fails early is answered with the status of its error.
    """

    def __init__(
        self,
        exchange: Exchange,
        job: Job,
        requests: Sequence[InFlightRequest],
        limits: Mapping[str, int],
        stream: StreamFormat,
    ) -> None:
        self._exchange, self._job, self._requests = exchange, job, requests
        self._writer = stream
        self._mailbox: Mailbox = requests[0].mailbox
        self._stall, self._gap = limits["stall_seconds"], limits["ping_seconds"]
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._is_silent = self._has_opened = False
        self._timer = self._loop.call_later(self._gap, self._on_timer)

    async def run(self) -> None:
        """Write until the response ends. Raises ClientGone, and ApiError if the request fails before anything was
        sent."""
        self._exchange.scope[PROBE] = self._ping
        try:
            if self._is_queued:
                await self._send(self._writer.ping(is_queued=True))
            while not await self._send_deltas():
                pass
        finally:
            self._timer.cancel()

    @property
    def _is_queued(self) -> bool:
        return any(request.state == "queued" for request in self._requests)

    async def _send_deltas(self) -> bool:
        """Wait for deltas and write them. Returns whether the response is complete."""
        mailbox, writer = self._mailbox, self._writer
        await mailbox.wait()
        if mailbox.is_gone:
            raise ClientGone
        is_over = mailbox.is_over
        data = writer.events(mailbox.take())
        if mailbox.failure is not None:
            await self._end_with_error(data, as_failure(self._job.named(mailbox.failure)))
            return True
        if data or is_over:
            ending = writer.closing() if is_over else b""
            await self._send(self._with_opening(data) + ending, is_last=is_over)
        elif self._is_silent:
            await self._send(writer.ping(is_queued=self._is_queued))
        return is_over

    async def _end_with_error(self, data: bytes, error: ApiError) -> None:
        """End the stream with an error. Raises the error instead if nothing has been sent."""
        if not self._exchange.has_started:
            raise error
        await self._send((self._with_opening(data) if data else b"") + self._writer.failure(error), is_last=True)

    def _with_opening(self, data: bytes) -> bytes:
        """Return `data`, preceded by the opening events if this is the first data."""
        if self._has_opened:
            return data
        self._has_opened = True
        return self._writer.opening() + data

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._exchange.has_started:
            await self._exchange.start_stream(self._writer.content_type)
        await self._exchange.write(data, is_last=is_last, stall_seconds=self._stall)
        self._sent_at, self._is_silent = self._loop.time(), False

    def _on_timer(self) -> None:
        """Wake the stream if nothing was sent for `ping_seconds`, and set the next timer."""
        now, due = self._loop.time(), self._sent_at + self._gap
        if now >= due:
            due = now + self._gap
            self._ping()
        self._timer = self._loop.call_at(due, self._on_timer)

    def _ping(self) -> None:
        self._is_silent = True
        self._mailbox.wake()
