"""HostAdapters: which LoRA adapters are in host memory, and which waiting groups wait for theirs to be read again."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.decoding.group import Group

READING = "its LoRA adapter is read from its files"  # why a group waits


class HostAdapters:
    """A model of the executor's cache of adapters in host memory: the most recently used adapters, by digest.
    `capacity` is that of the executor minus one, because the moment at which the executor counts an adapter being read
    is not known; 0: it keeps all.

    A group whose adapter has left host memory waits until it has been read again, so that no step reads files. Adapters
    are read one at a time, and none while groups of the last one are still to be admitted, so that it is not evicted
    before it is used. An adapter for which a group has waited is placed next, even if it could not be read.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity - 1) if capacity else 0
        self._held: dict[str, None] = {}  # most recently used last
        self.missing: dict[str, dict[Group, None]] = {}  # by adapter to be read: the groups that wait for it
        self._ordered = ""  # the adapter that is being read, one of `missing`
        self._waited: dict[Group, None] = {}  # groups whose adapter was read, until they are admitted
        self.order: Callable[[str], None] = lambda _: None  # starts to read an adapter; `arrived` must follow
        self.ready: list[Group] = []  # groups that no longer wait; the scheduler resumes them

    def is_missing(self, adapter: str) -> bool:
        """Whether an adapter must be read before it can be put into a slot."""
        return adapter in self.missing

    def use(self, adapter: str) -> None:
        """Note that the executor read an adapter, or put it into a slot."""
        if self._capacity:
            self._held.pop(adapter, None)
            self._held[adapter] = None
            while len(self._held) > self._capacity:
                del self._held[next(iter(self._held))]

    def forget(self, adapter: str) -> None:
        """Forget an adapter that the executor dropped."""
        self._held.pop(adapter, None)

    def awaits(self, group: Group) -> bool:
        """Whether a group must wait for its adapter, which is in no slot, to be read. If so, it is added to `ready`
        later."""
        adapter = group.request.adapter_digest
        is_held = not self._capacity or adapter in self._held or group in self._waited
        if is_held and adapter not in self.missing:
            return False
        self.missing.setdefault(adapter, {})[group] = None
        self.fetch()
        return True

    def fetch(self) -> None:
        """Start to read the next adapter, unless one is being read or is still to be used."""
        if self.missing and not self._ordered and not self._waited:
            self._ordered = next(iter(self.missing))
            self.use(self._ordered)
            self.order(self._ordered)

    def arrived(self, adapter: str, *, was_read: bool) -> None:
        """Note that the reading of an adapter has ended."""
        groups = self.missing.pop(adapter)
        self._ordered = ""
        if not was_read:
            self.forget(adapter)
        self._waited |= groups
        self.ready += groups

    def release(self, group: Group) -> None:
        """Let other adapters be read, because this group, whose adapter was read, now waits for a slot."""
        self._waited.pop(group, None)

    def leave(self, group: Group) -> None:
        """Forget a group that was admitted or has ended. Idempotent."""
        self._waited.pop(group, None)
        adapter = group.request.adapter_digest
        if group in self.missing.get(adapter, ()):
            del self.missing[adapter][group]
            if not self.missing[adapter] and adapter != self._ordered:
                del self.missing[adapter]

    def check(self, queued: set[Group]) -> None:
        assert not self._capacity or len(self._held) <= self._capacity
        assert queued >= self._waited.keys()
        assert all(queued >= groups.keys() for groups in self.missing.values())
        assert all(groups or adapter == self._ordered for adapter, groups in self.missing.items())
        assert not self._ordered or self._ordered in self.missing
