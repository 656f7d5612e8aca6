"""The queue of waiting groups, sorted by the policy's key, and the running groups."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key


class GroupQueue:
    """Groups sorted by their keys, which are unique and never change. Insertion and removal use binary search.

    A deferred group must not be admitted yet. It keeps its place in the order, and is skipped until it is resumed.
    """

    def __init__(self, key: Callable[[Group], Key]) -> None:
        self._key_of = key
        self._keys: list[Key] = []  # of the groups that are ready, sorted
        self.ready: list[Group] = []  # the groups that are ready, most urgent first; read-only
        self._deferred: dict[Group, None] = {}
        self.version = 0  # changes whenever a group is added or removed

    def __len__(self) -> int:
        return len(self.ready) + len(self._deferred)

    def __iter__(self) -> Iterator[Group]:
        """Iterate over a copy of all groups, deferred ones included, most urgent first."""
        return iter(sorted([*self.ready, *self._deferred], key=self._key_of) if self._deferred else self.ready[:])

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    def head(self, count: int) -> list[Group]:
        """Return the `count` most urgent groups that are ready."""
        return self.ready[:count]

    def add(self, group: Group) -> None:
        self.version += 1
        self._insert(group)

    def remove(self, group: Group) -> None:
        self.version += 1
        if self.ready and self.ready[0] is group:  # as usual
            del self._keys[0], self.ready[0]
        elif group in self._deferred:
            del self._deferred[group]
        else:
            self._take_out(group)

    def defer(self, group: Group) -> None:
        """Skip a group until it is resumed."""
        self._take_out(group)
        self._deferred[group] = None

    def resume(self, group: Group) -> None:
        """Stop skipping a deferred group."""
        del self._deferred[group]
        self._insert(group)

    def is_deferred(self, group: Group) -> bool:
        return group in self._deferred

    def first(self) -> Group | None:
        """Return the most urgent group that is ready."""
        return self.ready[0] if self.ready else None

    def last(self) -> Group | None:
        """Return the least urgent group that is ready."""
        return self.ready[-1] if self.ready else None

    def _insert(self, group: Group) -> None:
        key, keys = self._key_of(group), self._keys
        if not keys or keys[-1] < key:  # as usual under fcfs
            keys.append(key)
            self.ready.append(group)
        else:
            position = bisect_left(keys, key)
            keys.insert(position, key)
            self.ready.insert(position, group)

    def _take_out(self, group: Group) -> None:
        ready, position = self.ready, bisect_left(self._keys, self._key_of(group))
        if position == len(ready) or ready[position] is not group:
            raise KeyError(group.request.request_id)
        del self._keys[position], ready[position]

    def check(self) -> None:
        assert self._keys == sorted(set(self._keys))
        assert self._keys == [self._key_of(group) for group in self.ready]
        assert not self._deferred.keys() & set(self.ready)


class RunningGroups:
    """The running groups. They are sorted only when one must be preempted, so adding and removing one is cheap."""

    def __init__(self, key: Callable[[Group], Key]) -> None:
        self._key_of = key
        self._groups: dict[Group, None] = {}
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """Iterate over a copy, in no particular order."""
        return iter(list(self._groups))

    def add(self, group: Group) -> None:
        self._groups[group] = None
        self._is_sorted = False

    def remove(self, group: Group) -> None:
        del self._groups[group]

    def last(self) -> Group | None:
        """Return the least urgent group by the policy's key: the one to preempt."""
        if not self._is_sorted:
            self._groups = dict.fromkeys(sorted(self._groups, key=self._key_of))
            self._is_sorted = True
        return next(reversed(self._groups), None)
