"""Requests that are open, by their ids."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class OpenRequests(Generic[T]):
    """What belongs to each request until its end is said. An id may be used again before that: ends come in order."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, deque[T]] = defaultdict(deque)

    def add(self, request_id: str, value: T) -> None:
        self._by_id[request_id].append(value)

    def take(self, request_id: str) -> T:
        """What belongs to the oldest request of that id, which is over."""
        values = self._by_id[request_id]
        value = values.popleft()
        if not values:
            del self._by_id[request_id]
        return value

    def drop(self, request_id: str) -> None:
        """Forget the youngest request of that id: it was refused."""
        self._by_id[request_id].pop()
        if not self._by_id[request_id]:
            del self._by_id[request_id]

    def all(self) -> list[T]:
        return [value for values in self._by_id.values() for value in values]
