"""Files that hold what waiting groups will need are read while they wait."""

from __future__ import annotations

from typing import Protocol

from quire.engine.decoding.group import Group
from quire.engine.kvcache.tiers.base import Tiers
from quire.engine.scheduler.inheritance import Inheritance
from quire.engine.scheduler.policies.base import Policy, View
from quire.engine.scheduler.preemption import ComputeTime

_NEAR = 8  # groups that are soon to be let in, for which files are read
_LEAST_SECONDS, _MOST_SECONDS = 0.02, 2.0  # how long a group whose turn it is waits for its files
_MOST_LOOKS = 2_000  # and how often it is looked at meanwhile, at most


class Prefetch(Protocol):
    """Has files read for groups that wait, and says how long it is worth waiting for them."""

    def look(self, view: View) -> None:
        """Order what those first in line will need."""

    def delay(self, group: Group, now: float) -> str:
        """What a group whose turn it is waits for: "" if for no file. After a while it computes what is missing."""

    def forget(self, group: Group) -> None:
        """It waits no longer, and has what it was to find. Idempotent."""


class NoPrefetch:
    """There are no files."""

    def look(self, view: View) -> None: ...

    def delay(self, group: Group, now: float) -> str:  # noqa: ARG002 - Prefetch's signature
        return ""

    def forget(self, group: Group) -> None: ...


class _Errand:
    """Files for one group."""

    __slots__ = ("is_over", "left", "looks", "names", "since")

    def __init__(self, names: list[bytes]) -> None:
        self.names = self.left = names  # all, and those that are still to be ordered
        self.is_over = not names  # nobody waits for it any longer
        self.since: float | None = None  # when its turn came
        self.looks = 0


class FilePrefetch:
    """Looks for a group once, when it is soon to be let in by the policy. Bound: whoever is first waits no longer than
    computing the tokens would take twice, and never longer than two seconds."""

    def __init__(
        self, policy: Policy, inheritance: Inheritance, tiers: Tiers, compute: ComputeTime, block_size: int
    ) -> None:
        self._policy, self._inheritance, self._tiers, self._compute = policy, inheritance, tiers, compute
        self._block_size = block_size
        self._errands: dict[Group, _Errand] = {}

    def look(self, view: View) -> None:
        for group in self._policy.soon(view, _NEAR):
            self._run(group)

    def _run(self, group: Group) -> _Errand:
        """Order what is still to be ordered."""
        errand = self._errands.get(group)
        if errand is None:
            errand = self._errands[group] = _Errand(self._inheritance.find_files(group))
        if errand.left:
            errand.left = self._tiers.fetch(errand.left)
        return errand

    def delay(self, group: Group, now: float) -> str:
        errand = self._run(group)
        if errand.is_over:
            return ""
        awaited = len(errand.left) + sum(self._tiers.is_fetching(name) for name in errand.names)
        if errand.since is None:
            errand.since = now
        errand.looks += 1
        if awaited and now - errand.since < self._patience(awaited) and errand.looks < _MOST_LOOKS:
            return "reading files"
        self._tiers.give_up(awaited)
        errand.is_over = True
        return ""

    def forget(self, group: Group) -> None:
        errand = self._errands.pop(group, None)
        if errand is not None:
            self._tiers.let_go(errand.names)

    def _patience(self, num_blocks: int) -> float:
        seconds = self._compute.seconds(num_blocks * self._block_size)
        return _MOST_SECONDS if seconds is None else min(max(2 * seconds, _LEAST_SECONDS), _MOST_SECONDS)
