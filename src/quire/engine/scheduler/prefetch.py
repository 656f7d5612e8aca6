"""Prefetch from the disk tier: the files that a waiting group needs are read into host memory while it waits."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.decoding.group import Group
from quire.engine.kvcache.tiers.base import Tiers
from quire.engine.scheduler.step_time import ComputeTime

NEAR = 8  # groups that are likely to be admitted next, for which files are read
_LEAST_SECONDS, _MOST_SECONDS = 0.02, 2.0  # how long a group that could be admitted waits for its files
_MOST_LOOKS = 2_000  # and how often it is checked meanwhile, at most


class _Request:
    """The files that one group needs."""

    __slots__ = ("is_over", "left", "looks", "names", "since")

    def __init__(self, names: list[bytes]) -> None:
        self.names = self.left = names  # all files, and those whose reading is still to be ordered
        self.is_over = not names  # the group does not wait for files any more
        self.since: float | None = None  # when the group could first have been admitted
        self.looks = 0


class FilePrefetch:
    """Orders the reading of files for groups that are likely to be admitted next.

    A group that could be admitted waits for its files at most twice as long as computing the tokens would take, and at
    most two seconds. Meanwhile other groups are admitted.
    """

    def __init__(self, tiers: Tiers, compute: ComputeTime, block_size: int) -> None:
        self._tiers, self._compute, self._block_size = tiers, compute, block_size
        self.find: Callable[[Group], list[bytes]] = lambda _: []  # the files that a group needs; PrefixReuse.find_files
        self._requests: dict[Group, _Request] = {}
        self._waiting: dict[Group, None] = {}  # groups that could be admitted but for their files

    def look(self, groups: list[Group]) -> None:
        """Order the files of groups that are likely to be admitted next."""
        for group in groups:
            self._order(group)

    def _order(self, group: Group) -> _Request:
        """Order the files of a group that are not ordered yet. The files are looked up once for each group."""
        request = self._requests.get(group)
        if request is None:
            request = self._requests[group] = _Request(self.find(group))
        if request.left:
            request.left = self._tiers.fetch(request.left)
        return request

    def awaits_files(self, group: Group, now: float) -> bool:
        """If files of a group that could be admitted are still to be read, make the group wait and return True. A group
        that has waited long enough computes what is missing."""
        request = self._order(group)
        if request.is_over:
            return False
        num_missing = len(request.left) + sum(self._tiers.is_fetching(name) for name in request.names)
        if request.since is None:
            request.since = now
        request.looks += 1
        if num_missing and now - request.since < self._patience(num_missing) and request.looks < _MOST_LOOKS:
            self._waiting[group] = None
            return True
        self._tiers.count_late(num_missing)
        request.is_over = True
        return False

    def take_ready(self, now: float) -> list[Group]:
        """Return the groups that need not wait for their files any more."""
        ready = [group for group in self._waiting if not self.awaits_files(group, now)]
        for group in ready:
            del self._waiting[group]
        return ready

    def forget(self, group: Group) -> None:
        """Forget a group that was admitted or has ended, and release its files. Idempotent."""
        self._waiting.pop(group, None)
        request = self._requests.pop(group, None)
        if request is not None:
            self._tiers.release_fetched(request.names)

    def _patience(self, num_blocks: int) -> float:
        seconds = self._compute.seconds(num_blocks * self._block_size)
        return _MOST_SECONDS if seconds is None else min(max(2 * seconds, _LEAST_SECONDS), _MOST_SECONDS)
