"""The queue of requests that wait at the edge. It is bounded and ordered, and survives the death of an engine."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator

from quire.config.policy import DEFAULT_AGEING
from quire.serving.dispatch.in_flight_request import InFlightRequest


class QueueOrder:
    """Computes the sort key of a request, smaller first: its priority, minus one per `ageing` seconds of waiting.
    Requests that pin a prefix come first: operators send them, and other requests then find the prefix.

    With `by_tenant` it shares the engine fairly between tenants, by prompt tokens (start-time fair queueing): a
    tenant's requests queue behind its own earlier ones, not before requests that another tenant sends later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ageing, self.by_tenant = DEFAULT_AGEING, False
        self._clock = clock
        self._reached = 0.0  # the key of the last request that was taken in order
        self._ends: dict[str, float] = {}  # by tenant: the key of its next request, unless `_reached` has passed it

    def key(self, request: InFlightRequest) -> float:
        if request.submit.pin:
            return -math.inf
        if not self.by_tenant:
            return request.submit.priority + self._clock() / self.ageing
        tenant = request.submit.tenant
        start = max(self._reached, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + request.weight
        return start

    def reach(self, key: float) -> None:
        """The request with this key, the smallest, was taken."""
        self._reached = max(self._reached, key)

    def forget(self) -> None:
        """The queue is empty: forget the keys of all tenants."""
        self._reached = 0.0
        self._ends.clear()


class RequestQueue:
    """Requests sorted by `order`, bounded in number and in prompt tokens. The caller checks `has_room` before `add`."""

    def __init__(self, max_requests: int, max_tokens: int, order: QueueOrder | None = None) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self.order = order or QueueOrder()
        self._heap: list[tuple[float, int, InFlightRequest]] = []
        self._queued: dict[InFlightRequest, None] = {}
        self._numbers = itertools.count()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(list(self._queued))

    def has_room(self, num_requests: int, num_tokens: int, elsewhere: tuple[int, int] = (0, 0)) -> bool:
        """Whether so many more fit, given the requests and tokens queued `elsewhere`, which share the bounds.

        An empty queue takes the requests of one client whatever their number and their tokens: other limits bound them.
        """
        waiting, tokens = len(self) + elsewhere[0], self.num_tokens + elsewhere[1]
        if not waiting:
            return True
        return waiting + num_requests <= self._max_requests and tokens + num_tokens <= self._max_tokens

    def add(self, request: InFlightRequest) -> None:
        heapq.heappush(self._heap, (self.order.key(request), next(self._numbers), request))
        self._queued[request] = None
        self.num_tokens += request.weight

    def first(self) -> InFlightRequest | None:
        """The next request. It stays in the queue."""
        while self._heap and self._heap[0][2] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request from any place in the queue. Does nothing if it is not queued."""
        if request not in self._queued:
            return
        if self._heap[0][2] is request:
            self.order.reach(self._heap[0][0])
        del self._queued[request]
        if not self._queued:
            self.order.forget()
        self.num_tokens -= request.weight
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._queued]
            heapq.heapify(self._heap)

    def check(self) -> None:
        assert self.num_tokens == sum(request.weight for request in self._queued)
        assert {entry[2] for entry in self._heap} >= set(self._queued)
