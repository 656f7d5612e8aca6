"""The queue of requests that wait at the edge. It is bounded and ordered, and is kept when the engine dies."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator

from quire.config.policy import DEFAULT_AGEING
from quire.serving.dispatch.in_flight_request import InFlightRequest


class QueueOrder:
    """Computes the sort key of a request; smaller keys go first. The key is the priority of the request plus its
    arrival time divided by `ageing`, so `ageing` seconds of waiting count as much as one step of priority. Requests
    that pin a prefix go first: operators send them, and later requests can then reuse the prefix.

    With `by_tenant` the engine is shared fairly between tenants by prompt tokens (start-time fair queueing): a tenant's
    request queues behind that tenant's earlier requests, but not behind the backlog of other tenants.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ageing, self.by_tenant = DEFAULT_AGEING, False
        self._clock = clock
        self._reached = 0.0  # the largest key of a request that was taken from the head of the queue
        self._ends: dict[str, float] = {}  # by tenant: the key of its next request, if above `_reached`

    def key(self, request: InFlightRequest) -> float:
        """Return the sort key of a request that is queued now. With `by_tenant`, also advance the tenant's next key."""
        if request.submit.pin:
            return -math.inf
        if not self.by_tenant:
            return request.submit.priority + self._clock() / self.ageing
        tenant = request.submit.tenant
        start = max(self._reached, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + request.weight
        return start

    def reach(self, key: float) -> None:
        """Note that the request at the head of the queue, which has this key, was taken."""
        self._reached = max(self._reached, key)

    def forget(self) -> None:
        """Forget the keys of all tenants, because the queue is empty."""
        self._reached = 0.0
        self._ends.clear()


class RequestQueue:
    """Requests sorted by `order`, bounded in number and in prompt tokens. Callers must check `has_room` before
    `add`."""

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
        """Whether this many more requests and prompt tokens fit. `elsewhere`: the requests and tokens queued at other
        edges, which count towards the same bounds.

        An empty queue accepts the requests of one client whatever their number and tokens; other limits bound those.
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
        """Return the next request, which stays in the queue, or None."""
        while self._heap and self._heap[0][2] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request from anywhere in the queue. Does nothing if it is not queued."""
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
