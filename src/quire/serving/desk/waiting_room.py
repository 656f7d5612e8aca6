"""Requests that wait at the edge for a place in the engine: bounded, in order, and untouched by an engine's death."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from quire.serving.desk.ticket import Ticket
from quire.serving.desk.turns import Turns


class WaitingRoom:
    """In order of `turns`. Bounded in requests and in tokens; who does not fit is not taken in."""

    def __init__(self, max_requests: int, max_tokens: int, turns: Turns | None = None) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self.turns = turns or Turns()
        self._heap: list[tuple[float, int, Ticket]] = []
        self._inside: dict[Ticket, None] = {}
        self._numbers = itertools.count()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._inside))

    def has_room(self, num_requests: int, num_tokens: int, elsewhere: tuple[int, int] = (0, 0)) -> bool:
        """Whether so many more fit, besides the requests and tokens that wait `elsewhere` under the same bound.

        Where nothing waits, one client's requests fit however many tokens they have.
        """
        waiting, tokens = len(self) + elsewhere[0], self.num_tokens + elsewhere[1]
        if waiting + num_requests > self._max_requests:
            return False
        return tokens + num_tokens <= self._max_tokens or not waiting

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._heap, (self.turns.key(ticket), next(self._numbers), ticket))
        self._inside[ticket] = None
        self.num_tokens += ticket.weight

    def first(self) -> Ticket | None:
        """Who is next; stays inside."""
        while self._heap and self._heap[0][2] not in self._inside:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, ticket: Ticket) -> None:
        """Let one go, wherever it stands. Nobody inside: no change."""
        if ticket not in self._inside:
            return
        if self._heap[0][2] is ticket:
            self.turns.reach(self._heap[0][0])
        del self._inside[ticket]
        if not self._inside:
            self.turns.forget()
        self.num_tokens -= ticket.weight
        if len(self._heap) > 2 * len(self._inside) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._inside]
            heapq.heapify(self._heap)

    def check(self) -> None:
        assert self.num_tokens == sum(ticket.weight for ticket in self._inside)
        assert {entry[2] for entry in self._heap} >= set(self._inside)
