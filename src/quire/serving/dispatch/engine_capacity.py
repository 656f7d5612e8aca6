"""Decides how many requests are submitted to the engine. All others wait in the queues of the edges, so they survive
the death of an engine."""

from __future__ import annotations

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.process.edge_loads import EdgeLoadTable
from quire.serving.process.link import EngineLink, EngineReady

EDGE_ORDERED = frozenset({"fcfs", "priority", "fair"})  # scheduling policies whose order the edge queues implement
# Other policies choose among the waiting requests in the engine, so it gets this multiple of max_num_seqs.
CHOOSING_WINDOW = 2
_LEAST_AHEAD = 8  # the engine may hold up to this many requests that it does not run yet, however small it is


class EngineCapacity:
    """Counts the sequences that this edge has in the engine, and decides whether the engine can use another request.

    All edges together submit at most as many sequences as the engine runs at once. While several edges have queues,
    each of them is limited to its share. The KV cache may be full before all rows are taken, and only the engine knows
    that: it reports how many requests are waiting in it, and the edges keep that number small.
    """

    def __init__(self, link: EngineLink, edge_loads: EdgeLoadTable, num_workers: int) -> None:
        self._link, self._edge_loads, self._num_workers = link, edge_loads, num_workers
        self._num_requests = 0
        self.num_sequences = 0
        self._steps = 0  # the engine's step count at its last report of the backlog
        self._num_sent = 0  # requests submitted since then

    def reset(self) -> None:
        """Reset the backlog for a new engine, which has not made a step yet."""
        self._steps = self._num_sent = 0

    def add(self, request: InFlightRequest) -> None:
        self._num_requests += 1
        self.num_sequences += request.num_sequences
        self._num_sent += 1

    def remove(self, request: InFlightRequest) -> None:
        self._num_requests -= 1
        self.num_sequences -= request.num_sequences

    def has_room(self, engine: EngineReady, num_sequences: int) -> bool:
        """Whether the engine can use another request with this many sequences."""
        if not self._num_requests:
            return True
        if engine.policy not in EDGE_ORDERED:
            return self.num_sequences + num_sequences <= CHOOSING_WINDOW * engine.max_num_seqs
        others = self._edge_loads.others()
        wanted = self.num_sequences + num_sequences
        if wanted + others.sequences > engine.max_num_seqs:
            return False
        if others.waiting and wanted > engine.max_num_seqs // self._num_workers:
            return False
        return self._num_unplanned() < max(_LEAST_AHEAD, engine.max_num_seqs // 2)

    def _num_unplanned(self) -> int:
        """Return how many requests the engine holds but does not run yet: its reported backlog, plus what this edge has
        submitted since that report."""
        backlog = self._link.backlog()
        if backlog is None:
            return self._num_sent
        if backlog.steps != self._steps:
            self._steps, self._num_sent = backlog.steps, 0
        return backlog.num_waiting + self._num_sent
