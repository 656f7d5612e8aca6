"""Decides how many requests go to the engine. All others wait in the queues of the edges and survive its death."""

from __future__ import annotations

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.process.edge_loads import EdgeLoadTable
from quire.serving.process.link import EngineLink, EngineReady

EDGE_ORDERED = frozenset({"fcfs", "priority", "fair"})  # policies whose order the queues of the edges keep
CHOOSING_WINDOW = 2  # for other policies, which choose among waiting requests: as many times the engine's sequences
_LEAST_AHEAD = 8


class EngineCapacity:
    """Counts the sequences that this edge has in the engine, and says whether the engine can use another request.

    All edges together submit as many sequences as the engine runs at once. While several edges have queues, each of
    them may use its share. The engine may lack KV blocks before it lacks rows, which only the engine knows: it reports
    how many requests it could not run in a step, and edges submit little more than it runs.
    """

    def __init__(self, link: EngineLink, edge_loads: EdgeLoadTable, num_workers: int) -> None:
        self._link, self._edge_loads, self._num_workers = link, edge_loads, num_workers
        self._num_requests = 0
        self.num_sequences = 0
        self._steps = 0  # of the engine, when it last reported its backlog
        self._num_sent = 0  # requests submitted since then

    def reset(self) -> None:
        """Another engine is up. It has made no step yet."""
        self._steps = self._num_sent = 0

    def add(self, request: InFlightRequest) -> None:
        self._num_requests += 1
        self.num_sequences += request.num_sequences
        self._num_sent += 1

    def remove(self, request: InFlightRequest) -> None:
        self._num_requests -= 1
        self.num_sequences -= request.num_sequences

    def has_room(self, engine: EngineReady, num_sequences: int) -> bool:
        """Whether the engine can use another request with so many sequences."""
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
        """Requests that the engine holds and does not run yet, as far as this edge knows."""
        backlog = self._link.backlog()
        if backlog is None:
            return self._num_sent
        if backlog.steps != self._steps:
            self._steps, self._num_sent = backlog.steps, 0
        return backlog.num_waiting + self._num_sent
