"""Requests that were in the engine when it died, and that go to the next engine."""

from __future__ import annotations

from collections.abc import Iterator

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.process.edge_loads import EdgeLoadTable


class RetryQueue:
    """Requests to submit again, in an order that finds the request that crashes the engine.

    Most crashes come from a request that has not produced a token yet. Such requests are tried one at a time: the next
    one is submitted when the one before has produced its first token or has ended, and nothing else is submitted
    meanwhile, at any edge. So if the engine dies then, the tried request is to blame, and no other. Requests that had
    produced tokens follow when all others have been tried.
    """

    def __init__(self, edge_loads: EdgeLoadTable) -> None:
        self._edge_loads = edge_loads
        self._untried: dict[InFlightRequest, None] = {}
        self._started: dict[InFlightRequest, None] = {}
        self.tried: InFlightRequest | None = None  # in the engine, without a token so far

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
        """Return the requests that may have crashed the engine that had `lost`: the tried one if there is one."""
        if self.tried is not None:
            return [self.tried]
        return [] if self._edge_loads.others().retrying else lost

    def add(self, request: InFlightRequest) -> None:
        """Queue a request that was in the engine when it died. Its state is still that of the dead engine."""
        (self._started if request.has_started else self._untried)[request] = None

    def first(self) -> InFlightRequest | None:
        """Return the request to submit next; None if there is none, or if the tried one must produce a token first."""
        return None if self.is_trying else next(iter(self), None)

    def start(self, request: InFlightRequest) -> None:
        """The request is submitted now."""
        if request in self._untried:
            self.tried = request
        self._untried.pop(request, None)
        self._started.pop(request, None)

    def remove(self, request: InFlightRequest) -> None:
        """The request has produced a token, or has ended. Does nothing for other requests."""
        self._untried.pop(request, None)
        self._started.pop(request, None)
        if self.tried is request:
            self.tried = None
