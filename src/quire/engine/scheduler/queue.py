"""Groups in an order that does not change: those that wait, and those that run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key


class GroupQueue:
    """Groups sorted by their keys, which are unique and unchanging; insertion and removal by binary search.

    A deferred group is not ready to be admitted: it keeps its place, but is passed over until it is resumed.
    """

    def __init__(self, key: Callable[[Group], Key]) -> None:
        self._key_of = key
        self._keys: list[Key] = []  # of the groups that are ready, sorted
        self._ready: list[Group] = []  # in the same order
        self._deferred: dict[Group, None] = {}
        self.version = 0  # changes with every group that comes or goes

    def __len__(self) -> int:
        return len(self._ready) + len(self._deferred)

    def __iter__(self) -> Iterator[Group]:
        """All groups, most urgent first, over a copy: members may leave meanwhile."""
        return iter(sorted([*self._ready, *self._deferred], key=self._key_of) if self._deferred else self._ready[:])

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def head(self, count: int) -> list[Group]:
        """The most urgent of those that are ready, so many at most."""
        return self._ready[:count]

    def add(self, group: Group) -> None:
        self.version += 1
        self._insert(group)

    def remove(self, group: Group) -> None:
        self.version += 1
        if self._deferred and group in self._deferred:
            del self._deferred[group]
        else:
            self._take_out(group)

    def defer(self, group: Group) -> None:
        """Pass the group over from now on."""
        self._take_out(group)
        self._deferred[group] = None

    def resume(self, group: Group) -> None:
        """Pass the group over no longer."""
        del self._deferred[group]
        self._insert(group)

    def is_deferred(self, group: Group) -> bool:
        return group in self._deferred

    def first(self) -> Group | None:
        """The most urgent of those that are ready."""
        return self._ready[0] if self._ready else None

    def last(self) -> Group | None:
        """The least urgent of those that are ready."""
        return self._ready[-1] if self._ready else None

    def _insert(self, group: Group) -> None:
        key = self._key_of(group)
        position = bisect_left(self._keys, key)
        self._keys.insert(position, key)
        self._ready.insert(position, group)

    def _take_out(self, group: Group) -> None:
        position = bisect_left(self._keys, self._key_of(group))
        if position == len(self._ready) or self._ready[position] is not group:
            raise KeyError(group.request.request_id)
        del self._keys[position], self._ready[position]

    def check(self) -> None:
        assert self._keys == sorted(set(self._keys))
        assert self._keys == [self._key_of(group) for group in self._ready]
        assert not self._deferred.keys() & set(self._ready)
