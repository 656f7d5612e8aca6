"""FilePrefetch: reads the blocks that a waiting group needs from the disk tier and from other engines into host memory,
before the group is admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import nsmallest

from quire.engine.decoding.group import Group
from quire.engine.kvcache.tiers.base import RemoteLookup, Tiers
from quire.engine.scheduler.policies.base import Key
from quire.engine.scheduler.step_time import ComputeTime

NEAR = 8  # how many likely next groups get their files read; and how many groups may wait for files at once
_LEAST_SECONDS, _MOST_SECONDS = 0.02, 2.0  # how long a group that could be admitted waits for its files
_MOST_PLANS = 2_000  # most plans that such a group waits
_MOST_PROMOTED = 512  # most passed-over groups that may be chosen in one plan


class _Wait:
    """When a group began to wait."""

    __slots__ = ("_plan", "_since")

    def __init__(self, now: float, plan: int) -> None:
        self._since, self._plan = now, plan

    def is_within(self, seconds: float, now: float, plan: int) -> bool:
        return now - self._since < seconds and plan - self._plan < _MOST_PLANS


class _Request:
    """The files that one group needs, and how far they are read. Blocks of other engines are handled like files."""

    __slots__ = ("is_over", "left", "lookup", "names", "started", "wait")

    def __init__(self, lookup: RemoteLookup | None) -> None:
        self.lookup = lookup  # the lookup at other engines, until it is answered
        self.names: list[bytes] = []  # all files, once they were looked up
        self.left: list[bytes] = []  # files whose reading is still to be started
        self.started: list[bytes] = []  # files whose reading was started, and that may not have arrived yet
        self.is_over = False  # the group does not wait for files any more
        self.wait: _Wait | None = None  # since the group could first have been admitted

    def set_names(self, names: list[bytes]) -> None:
        self.names, self.left, self.lookup = names, names, None
        self.is_over = self.is_over or not names


class FilePrefetch:
    """Decides which files are read for waiting groups, and how long a group waits for them. Prefill passes it the
    groups that are likely to be admitted next; PrefixReuse asks it before a group is admitted. Tiers reads the files.

    A group that could be admitted waits for its files at most twice as long as computing their tokens would take, and
    at most two seconds. Meanwhile other groups are admitted. Then it computes the tokens of files that were not read.

    At most `NEAR` groups wait for files at the same time, and no further group begins to wait while a waiting group has
    files whose reading is not started yet. Every other group that needs files is passed over: the scheduler does not
    consider it until it may wait, or until it was passed over for two seconds; then it computes the missing tokens.
    """

    def __init__(self, tiers: Tiers, compute: ComputeTime, block_size: int, *, asks: bool = False) -> None:
        self._tiers, self._compute, self._block_size = tiers, compute, block_size
        self._asks = asks  # whether other engines are asked
        self.reason = "other engines are asked for its blocks" if asks else "its blocks are read from disk"
        self.ask: Callable[[Group], RemoteLookup | None] = lambda _group: None  # PrefixReuse.ask
        # Returns the files that a group needs, among the next so many blocks or all; PrefixReuse.find_files.
        self.find: Callable[[Group, int | None], list[bytes]] = lambda _group, _num_blocks: []
        self._requests: dict[Group, _Request] = {}
        self._waiting: dict[Group, None] = {}  # groups that could be admitted if their files were read
        self._passed_over: dict[Group, None] = {}  # groups that could be admitted, and need files, but may not wait yet
        self._waits: dict[Group, _Wait] = {}  # since when groups have been passed over
        self._oldest: deque[tuple[Group, _Wait]] = deque()  # the same, oldest first; may contain groups that have left
        self._promoted: set[Group] = set()  # groups that may wait now, and that the scheduler has not chosen since
        self._num_places = NEAR  # how many groups may wait or be promoted; more while promoted groups need not wait
        self._is_full = False  # the tiers had no slot for a file when last asked
        self._plan = 0  # plans made so far

    def look(self, groups: list[Group]) -> None:
        """Start to read the files of groups that are likely to be admitted next."""
        for group in groups:
            self._order(self._request(group))

    def _request(self, group: Group) -> _Request:
        """Return the files that a group needs. They are looked up once, after the lookup at other engines was
        answered."""
        request = self._requests.get(group)
        if request is None:
            request = self._requests[group] = _Request(self.ask(group) if self._asks else None)
        elif request.lookup is None or request.is_over:
            return request
        if request.lookup is None or not self._tiers.is_asking(request.lookup):
            request.set_names(self.find(group, None))
        return request

    def _order(self, request: _Request) -> None:
        """Start to read the files of a request that are left, as far as the tiers have slots for them."""
        if request.left and not self._is_full:
            left = self._tiers.fetch(request.left)
            waiting = set(left)
            request.started += [name for name in request.left if name not in waiting]
            request.left, self._is_full = left, bool(left)

    def awaits_files(self, group: Group, now: float) -> bool:
        """Whether a group that could be admitted must wait because files of it are still to be read; if so, make it
        wait. A group that has waited long enough computes the missing tokens."""
        self._promoted.discard(group)
        request = self._requests.get(group)
        if request is not None and request.is_over:
            return False
        if group not in self._waiting:
            wait = self._waits.get(group)
            if wait is not None and not wait.is_within(_MOST_SECONDS, now, self._plan):
                self._end_wait(self._request(group))
                return False
            if not self._may_wait():
                return self._pass_over(group, now)
        request = self._request(group)
        self._order(request)
        if request.wait is None:
            request.wait = _Wait(now, self._plan)
        num_missing = self._num_missing(request)
        if num_missing and request.wait.is_within(self._patience(num_missing), now, self._plan):
            if group not in self._waiting:
                self._waiting[group], self._num_places = None, NEAR
            return True
        self._end_wait(request)
        return False

    def _may_wait(self) -> bool:
        """Whether one more group may wait for files."""
        return len(self._waiting) < NEAR and not any(self._requests[group].left for group in self._waiting)

    def _pass_over(self, group: Group, now: float) -> bool:
        """Pass over a group that needs files while no more groups may wait for theirs. Returns False if it needs
        none."""
        is_known = group in self._requests
        # Looking up one block is cheap and usually sufficient. Other engines are asked for all blocks at once.
        needs_files = not is_known and not self._asks and bool(self.find(group, 1))
        if not needs_files and not self._num_missing(self._request(group)):
            self._end_wait(self._request(group))
            return False
        if group not in self._waits:
            self._waits[group] = _Wait(now, self._plan)
            self._oldest.append((group, self._waits[group]))
        self._passed_over[group], self._num_places = None, NEAR
        return True

    def _num_missing(self, request: _Request) -> int:
        """Return how many files of a request have not been read; before they are looked up, how many it may have."""
        if request.lookup is not None:
            return request.lookup.num_blocks
        request.started = [name for name in request.started if self._tiers.is_fetching(name)]
        return len(request.left) + len(request.started)

    def _end_wait(self, request: _Request) -> None:
        """End the wait of a group: it computes the tokens of files that have not been read."""
        self._tiers.count_late(self._num_missing(request))
        request.is_over, request.lookup = True, None

    def take_ready(self, now: float, rank: Callable[[Group], Key]) -> list[Group]:
        """Return the groups that may be chosen again: those that no longer wait for their files, and passed-over groups
        that may now wait, the smallest rank first. Called once per plan."""
        self._plan += 1
        self._is_full = False
        ready = [group for group in self._waiting if not self.awaits_files(group, now)]
        for group in ready:
            del self._waiting[group]
        while self._oldest and not self._oldest[0][1].is_within(_MOST_SECONDS, now, self._plan):
            group, wait = self._oldest.popleft()
            if group in self._passed_over and self._waits[group] is wait:
                del self._passed_over[group]
                ready.append(group)
        if self._passed_over and self._may_wait():
            ready += self._promote(rank)
        return ready

    def _promote(self, rank: Callable[[Group], Key]) -> list[Group]:
        """Return passed-over groups that may now wait. If all groups promoted last have been chosen and none had to
        wait, promote twice as many: groups that need the same files as others find them in host memory."""
        if self._promoted:
            self._num_places = NEAR
        num_free = self._num_places - len(self._waiting) - len(self._promoted)
        promoted = nsmallest(num_free, self._passed_over, key=rank)
        for group in promoted:
            del self._passed_over[group]
            self._promoted.add(group)
        if promoted:
            self._num_places = min(2 * self._num_places, _MOST_PROMOTED)
        return promoted

    def forget(self, group: Group) -> None:
        """Forget a group that was admitted or has ended, and release its files. Idempotent."""
        self._waiting.pop(group, None)
        self._passed_over.pop(group, None)
        self._waits.pop(group, None)
        self._promoted.discard(group)
        request = self._requests.pop(group, None)
        if request is not None and request.names:
            self._tiers.release_fetched(request.names)
            self._is_full = False

    def _patience(self, num_blocks: int) -> float:
        seconds = self._compute.seconds(num_blocks * self._block_size)
        return _MOST_SECONDS if seconds is None else min(max(2 * seconds, _LEAST_SECONDS), _MOST_SECONDS)
