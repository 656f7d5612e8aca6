"""Groups in an order that does not change: those that wait, and those that run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key


class GroupQueue:
    """Groups sorted by their keys, which are unique and unchanging; insertion and removal by binary search."""

    def __init__(self, key: Callable[[Group], Key]) -> None:
        self._key_of = key
        self._entries: list[tuple[Key, Group]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Group]:
        """Most urgent first, over a copy: members may leave while it runs."""
        return iter([group for _, group in self._entries])

    def head(self, count: int) -> list[Group]:
        """The most urgent, so many at most."""
        return [group for _, group in self._entries[:count]]

    def add(self, group: Group) -> None:
        insort(self._entries, (self._key_of(group), group), key=_key)

    def remove(self, group: Group) -> None:
        position = bisect_left(self._entries, self._key_of(group), key=_key)
        if position == len(self._entries) or self._entries[position][1] is not group:
            raise KeyError(group.request.request_id)
        del self._entries[position]

    def first(self) -> Group | None:
        return self._entries[0][1] if self._entries else None

    def last(self) -> Group | None:
        """The least urgent."""
        return self._entries[-1][1] if self._entries else None

    def check(self) -> None:
        keys = [key for key, _ in self._entries]
        assert keys == sorted(set(keys))
        assert keys == [self._key_of(group) for _, group in self._entries]


def _key(entry: tuple[Key, Group]) -> Key:
    return entry[0]
