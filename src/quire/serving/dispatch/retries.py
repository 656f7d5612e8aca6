"""The queue of requests that were in an engine when it died and are submitted to the next one."""

from __future__ import annotations

from collections.abc import Iterator

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.process.edge_loads import EdgeLoadTable


class RetryQueue:
    """Requests to submit again, in an order that finds the request that crashes the engine.

    Most crashes are caused by a request that has not produced a token yet. Such requests are tried one at a time: the
    next one is submitted after the previous one has produced its first token or has ended, and meanwhile no edge
    submits anything else. So if the engine dies then, the tried request is to blame. Requests that had produced tokens
    are submitted after all others have been tried.
    """

    def __init__(self, edge_loads: EdgeLoadTable) -> None:
        self._edge_loads = edge_loads
        self._untried: dict[InFlightRequest, None] = {}
        self._started: dict[InFlightRequest, None] = {}
        self.tried: InFlightRequest | None = None  # is in the engine and has not produced a token since

    def __len__(self) -> int:
        return len(self._untried) + len(self._started)

    def __contains__(self, request: InFlightRequest) -> bool:
        return request in self._untried or request in self._started

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter([*self._untried, *self._started])

    @property
    def num_tokens(self) -> int:
        return sum(request.weight for request in self)

    @property
    def is_trying(self) -> bool:
        """Whether this edge or another one waits for the first token of a tried request."""
        return self.tried is not None or self._edge_loads.others().retrying > 0

    def suspects(self, lost: list[InFlightRequest]) -> list[InFlightRequest]:
        """Return the requests that may have crashed the engine, of the requests `lost` with it: only the tried request
        if there is one here, none if another edge has one, else all."""
        if self.tried is not None:
            return [self.tried]
        return [] if self._edge_loads.others().retrying else lost

    def add(self, request: InFlightRequest) -> None:
        """Queue a request whose engine died. Call it before `InFlightRequest.restart`, which resets `has_started`."""
        (self._started if request.has_started else self._untried)[request] = None

    def first(self) -> InFlightRequest | None:
        """Return the request to submit next. Returns None if there is none, or while a tried request has not produced a
        token."""
        return None if self.is_trying else next(iter(self), None)

    def start(self, request: InFlightRequest) -> None:
        """Remove a request that is being submitted. If it has not produced a token before, it becomes the tried
        request."""
        if request in self._untried:
            self.tried = request
        self._untried.pop(request, None)
        self._started.pop(request, None)

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request that has produced a token or has ended. Does nothing for other requests."""
        self._untried.pop(request, None)
        self._started.pop(request, None)
        if self.tried is request:
            self.tried = None
