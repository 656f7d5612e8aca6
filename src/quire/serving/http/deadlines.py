"""The time limits of a request: one for the whole request, one for its wait in the queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.config.server import TimeoutConfig
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Failure
from quire.serving.http.errors import ApiError, as_failure
from quire.serving.http.exchange import Exchange
from quire.types.errors import InvalidRequest

HEADER = b"x-request-timeout"
_FIELD = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When a request must have ended, and when it must have been submitted to the engine. Times of the monotonic clock;
    inf: no limit."""

    request: float
    queue: float

    @classmethod
    def of(cls, exchange: Exchange, timeouts: TimeoutConfig, received_at: float) -> Deadlines:
        """Return the deadlines of a request that was received at `received_at`: the server's timeouts, and the client's
        X-Request-Timeout if that is shorter. Raises InvalidRequest."""
        asked = _asked_seconds(exchange.headers.get(HEADER))
        request = min(asked, math.inf if timeouts.request is None else timeouts.request)
        return cls(received_at + request, received_at + (math.inf if timeouts.queue is None else timeouts.queue))

    @contextmanager
    def while_preparing(self) -> Iterator[asyncio.Timeout]:
        """Yield an asyncio timeout for the whole request, to enter with `async with`. When it expires inside, this
        raises ApiError (504)."""
        try:
            yield asyncio.timeout(None if self.request == math.inf else max(0.0, self.request - time.monotonic()))
        except TimeoutError:
            raise took_too_long() from None

    @contextmanager
    def enforced(self, dispatcher: Dispatcher, requests: Sequence[InFlightRequest]) -> Iterator[None]:
        """End the requests with an error when a deadline passes while the block runs."""

        def end_all() -> None:
            dispatcher.abort([one.submit.request_id for one in requests], "timeout")

        def end_queued() -> None:
            queued = [one.submit.request_id for one in requests if one.state == "queued"]
            if queued:
                dispatcher.abort(queued, "queue_timeout")

        loop, now = asyncio.get_running_loop(), time.monotonic()
        ends = ((self.request, end_all), (self.queue, end_queued))
        timers = [loop.call_later(max(0.0, when - now), end) for when, end in ends if when != math.inf]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


def took_too_long() -> ApiError:
    """Return the error of a request that exceeded its time limit."""
    return as_failure(Failure("timeout"))


def _asked_seconds(header: bytes | None) -> float:
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(
            _FIELD, f"must be a number of seconds above 0, got {header[:40].decode('latin-1')!a}", "like 30 or 0.5"
        )
    return seconds
