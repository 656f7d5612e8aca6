"""HostAdapters: which LoRA adapters are in the executor's host memory, and which waiting groups wait until their
adapter has been read into it again."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.decoding.group import Group

READING = "its LoRA adapter is read from its files"  # why a group waits


class HostAdapters:
    """The scheduler's copy of which LoRA adapters the executor holds in host memory, by digest, least recently used
    first.

    The executor evicts the least recently used adapter when its memory is full. The copy holds one adapter less than
    the executor's `capacity`, because the moment at which the executor counts an adapter that is being read is not
    known: so the scheduler never believes that an evicted adapter is present. A capacity of 0 means that the executor
    keeps all adapters.

    A group whose adapter was evicted waits until the adapter has been read again, so that no step has to read files.
    One adapter is read at a time. The next one is read when all groups that waited for the last one were admitted or
    wait for a slot, so that an adapter is not evicted before it is used. A group that has waited is admitted even if
    its adapter could not be read: then the step that places the adapter reports its rows as failed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity - 1) if capacity else 0
        self._held: dict[str, None] = {}  # most recently used last
        self.missing: dict[str, dict[Group, None]] = {}  # by adapter to be read: the groups that wait for it
        self._reading = ""  # the adapter that is being read, one of `missing`
        self._waited: dict[Group, None] = {}  # groups whose adapter was read, until they are admitted
        self.start_reading: Callable[[str], None] = lambda _: None  # starts to read an adapter; `arrived` must follow
        self.ready: list[Group] = []  # groups that no longer wait; the scheduler resumes them

    def is_missing(self, adapter: str) -> bool:
        """Whether an adapter must be read before it can be put into a slot."""
        return adapter in self.missing

    def use(self, adapter: str) -> None:
        """Mark an adapter as the most recently used: the executor reads it, or puts it into a slot."""
        if self._capacity:
            self._held.pop(adapter, None)
            self._held[adapter] = None
            while len(self._held) > self._capacity:
                del self._held[next(iter(self._held))]

    def forget(self, adapter: str) -> None:
        """Forget an adapter that the executor dropped."""
        self._held.pop(adapter, None)

    def awaits(self, group: Group) -> bool:
        """Whether a group whose adapter is in no slot must wait until it has been read into host memory. If so, the
        group is added to `ready` later."""
        adapter = group.request.adapter_digest
        is_held = not self._capacity or adapter in self._held or group in self._waited
        if is_held and adapter not in self.missing:
            return False
        self.missing.setdefault(adapter, {})[group] = None
        self.fetch()
        return True

    def fetch(self) -> None:
        """Start to read the next adapter, unless one is being read or is still to be used."""
        if self.missing and not self._reading and not self._waited:
            self._reading = next(iter(self.missing))
            self.use(self._reading)
            self.start_reading(self._reading)

    def arrived(self, adapter: str, *, was_read: bool) -> None:
        """Note that the reading of an adapter has ended."""
        groups = self.missing.pop(adapter)
        self._reading = ""
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
            if not self.missing[adapter] and adapter != self._reading:
                del self.missing[adapter]

    def check(self, queued: set[Group]) -> None:
        assert not self._capacity or len(self._held) <= self._capacity
        assert queued >= self._waited.keys()
        assert all(queued >= groups.keys() for groups in self.missing.values())
        assert all(groups or adapter == self._reading for adapter, groups in self.missing.items())
        assert not self._reading or self._reading in self.missing
