"""AdapterSlots: the device slots of LoRA adapters, as a scheduling rule. Running groups use at most as many different
adapters as the device has slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.engine.decoding.group import Group
from quire.engine.scheduler.adapter_host import HostAdapters
from quire.types.adapters import NO_ADAPTER, AdapterPlacement

NO_SLOT = "no free slot for its LoRA adapter"  # why a group waits
MAX_OVERTAKES = 64  # later groups that may be admitted before the group that has waited longest for a slot


class AdapterSlots:
    """Which adapter is in each slot, how many running groups use it, and which waiting groups wait for a slot. Adapters
    are identified by their digests.

    A slot without users keeps its adapter until another adapter needs a slot; then the least recently used one is
    replaced. If every slot has users, the group waits, and others overtake it. The slot that frees first is kept for
    the adapter that has waited longest. Groups whose adapter is in a slot could keep that slot busy forever: after
    MAX_OVERTAKES of them, no further group joins the slot with the fewest users, so that it frees.
    """

    def __init__(self, num_slots: int, num_in_host_memory: int = 0) -> None:
        self.host = HostAdapters(num_in_host_memory)
        self._adapters = [""] * num_slots  # by slot; "": empty
        self._users = [0] * num_slots  # running groups, by slot
        self._slots: dict[str, int] = {}  # by adapter: the slot that its groups may join
        # Slots without users, in the order in which they are taken.
        self._idle: dict[int, None] = dict.fromkeys(range(num_slots))
        self._closed: set[int] = set()  # slots with users that no further group may join
        self._broken: set[int] = set()  # closed slots whose content cannot be trusted
        self._unproven: dict[int, dict[Group, None]] = {}  # by slot from which no token has come yet: its users
        self._waiting: dict[str, dict[Group, None]] = {}  # by adapter, the one that has waited longest first
        self._kept: dict[str, dict[Group, None]] = {}  # adapters that got a slot, until one of these groups uses it
        self.placements: dict[int, str] = {}  # by slot: adapters that the workers have not copied into it yet
        self._num_overtakes = 0  # of the first waiting adapter
        self.ready: list[Group] = []  # groups whose adapter got a slot; the scheduler resumes them
        self.num_placements = 0  # since the start

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def num_used(self) -> int:
        """How many slots running groups use."""
        return sum(1 for count in self._users if count)

    @property
    def num_waiting(self) -> int:
        """How many groups wait for a slot."""
        return sum(map(len, self._waiting.values()))

    # ------------------------------------------------------------------------------------------------- waiting groups
    def may_enter(self, group: Group) -> bool:
        """Whether there is a slot for a waiting group."""
        return group.request.adapter_digest in self._slots or bool(self._idle)

    def needs_host(self, group: Group) -> bool:
        """Whether the adapter of a waiting group is in no slot of the device yet."""
        slot = self._slots.get(group.request.adapter_digest)
        return slot is None or slot in self.placements

    def wait(self, group: Group, now: float) -> None:
        """Note that a group waits for a slot. It is added to `ready` when its adapter gets one. Meanwhile the adapter
        that gets the next slot is read if it is not in host memory."""
        self._waiting.setdefault(group.request.adapter_digest, {})[group] = None
        self.host.release(group)
        self._read_next()
        if group.slot_wait_since is None:
            group.slot_wait_since = now

    def _read_next(self) -> None:
        """Start to read the adapter that gets the next slot."""
        if self._waiting:
            self.host.awaits(next(iter(next(iter(self._waiting.values())))))

    def _forget(self, group: Group) -> None:
        """Forget a group that no longer waits, because it was admitted or ended. Idempotent."""
        adapter = group.request.adapter_digest
        for groups in (self._waiting, self._kept):
            if adapter in groups and group in groups[adapter]:
                del groups[adapter][group]
                if not groups[adapter]:
                    del groups[adapter]
                    if groups is self._kept:
                        self._give_away(self._slots[adapter])  # it was kept for this group only

    # ------------------------------------------------------------------------------------------------- running groups
    def enter(self, group: Group) -> None:
        """Give a slot to a group that is admitted. `may_enter` must be true."""
        adapter = group.request.adapter_digest
        slot = self._slots.get(adapter)
        if slot is None:
            slot = next(iter(self._idle))
            self._place(slot, adapter)
        self._idle.pop(slot, None)
        self._kept.pop(adapter, None)
        self._forget(group)
        self.host.leave(group)
        self._users[slot] += 1
        group.slot, group.slot_wait_since = slot, None
        if slot in self._unproven:
            self._unproven[slot][group] = None
            group.held_chunks = []
        if self._waiting:
            self._note_overtake(group)

    def leave(self, group: Group) -> None:
        """Release the slot of a running group that ended or was preempted. Forget a waiting group that ended."""
        slot, group.slot = group.slot, NO_ADAPTER
        if slot == NO_ADAPTER:
            self._forget(group)
            self.host.leave(group)
            return
        group.held_chunks = None
        self._unproven.get(slot, {}).pop(group, None)
        self._users[slot] -= 1
        if not self._users[slot]:
            if slot in self._closed:
                self._open(slot)
            self._give_away(slot)

    def note_token(self, group: Group) -> Iterable[Group]:
        """Note that a token came from a group's slot, so its adapter is there. Returns the groups whose computed blocks
        were held back until then."""
        return () if group.slot in self._broken else self._unproven.pop(group.slot, ())

    def note_failure(self, group: Group) -> None:
        """Note that the computation of a running group failed. If no token has come from its slot yet, the adapter may
        not be there: no further group joins the slot, and the adapter is placed again."""
        slot = group.slot
        if slot in self._unproven:
            self._close(slot)
            self._broken.add(slot)

    def drop(self, adapter: str) -> None:
        """Empty the slot of an adapter that no live group uses."""
        slot = self._slots.get(adapter)
        if slot is not None:
            self._empty(slot)

    def take_placements(self) -> tuple[AdapterPlacement, ...]:
        """Return the placements for the plan being made. Adapters that are still being read are left out: no group that
        uses them was admitted."""
        taken = {slot: adapter for slot, adapter in self.placements.items() if not self.host.is_missing(adapter)}
        self.placements = {slot: adapter for slot, adapter in self.placements.items() if slot not in taken}
        self.num_placements += len(taken)
        for adapter in taken.values():
            self.host.use(adapter)
        return tuple(AdapterPlacement(slot, adapter) for slot, adapter in taken.items())

    # ----------------------------------------------------------------------------------------------------- slots
    def _place(self, slot: int, adapter: str) -> None:
        """Put an adapter into a slot without users."""
        before = self._adapters[slot]
        if before == adapter:
            return
        self._slots.pop(before, None)
        self._adapters[slot], self._slots[adapter], self.placements[slot] = adapter, slot, adapter
        self._unproven[slot] = {}

    def _give_away(self, slot: int) -> None:
        """Keep a slot without users for the adapter that has waited longest. If none waits, the slot is idle."""
        adapter = next(iter(self._waiting), None)
        if adapter is None:
            self._idle[slot] = None
            if self.host.is_missing(self._adapters[slot]):  # the groups for which it was to be read have ended
                del self._slots[self._adapters[slot]]
                self._clear(slot)
            if not self._adapters[slot]:
                self._take_first(slot)
            return
        self._kept[adapter] = self._waiting.pop(adapter)
        self._idle.pop(slot, None)
        self._place(slot, adapter)
        if slot in self.placements:
            for group in self._kept[adapter]:
                self.host.awaits(group)
        self.ready += self._kept[adapter]
        self._num_overtakes = 0
        self._read_next()

    def _take_first(self, slot: int) -> None:
        """Make this idle slot the next one to be taken."""
        del self._idle[slot]
        self._idle = {slot: None, **self._idle}

    def _close(self, slot: int) -> None:
        """Let no further group join a slot with users."""
        if slot not in self._closed:
            self._closed.add(slot)
            del self._slots[self._adapters[slot]]

    def _open(self, slot: int) -> None:
        """Reopen a closed slot that has no users any more."""
        self._closed.remove(slot)
        adapter, is_broken = self._adapters[slot], slot in self._broken
        self._broken.discard(slot)
        if is_broken or adapter in self._slots:
            self._clear(slot)
        else:
            self._slots[adapter] = slot

    def _empty(self, slot: int) -> None:
        """Forget the adapter of an idle slot."""
        del self._slots[self._adapters[slot]]
        self._clear(slot)
        self._take_first(slot)

    def _clear(self, slot: int) -> None:
        self._adapters[slot] = ""
        self.placements.pop(slot, None)
        self._unproven.pop(slot, None)

    def _note_overtake(self, group: Group) -> None:
        """Count a later group that was admitted before the first waiting one. From MAX_OVERTAKES on, close a slot."""
        first = next(iter(next(iter(self._waiting.values()))))
        if group.ordinal < first.ordinal:
            return
        self._num_overtakes += 1
        joined = [slot for slot in self._slots.values() if self._users[slot]]
        if self._num_overtakes >= MAX_OVERTAKES and joined and len(self._closed) < len(self._waiting):
            self._close(min(joined, key=self._users.__getitem__))
            self._num_overtakes = 0

    # ----------------------------------------------------------------------------------------------------- checks
    def check(self, running: Iterable[Group], waiting: Iterable[Group]) -> None:
        """Assert that running groups have the slots of their adapters, and that no slot is idle while a group waits."""
        users: Counter[int] = Counter()
        for group in running:
            adapter = group.request.adapter_digest
            assert (group.slot == NO_ADAPTER) == (not adapter)
            assert not adapter or self._adapters[group.slot] == adapter
            users[group.slot] += bool(adapter)
            assert (group.held_chunks is not None) == (group in self._unproven.get(group.slot, ()))
        assert all(count == users[slot] for slot, count in enumerate(self._users))
        queued = set(waiting)
        self.host.check(queued)
        assert all(group.slot == NO_ADAPTER for group in queued)
        for groups in (*self._waiting.values(), *self._kept.values()):
            assert groups
            assert groups.keys() <= queued
        kept = {self._slots[adapter] for adapter in self._kept}
        assert set(self._idle) == {slot for slot, count in enumerate(self._users) if not count} - kept
        assert not self._waiting or not self._idle
        assert not self._waiting.keys() & self._slots.keys()
        assert all(self._users[slot] for slot in self._closed)
        assert self._broken <= self._closed
        opened = {adapter: slot for slot, adapter in enumerate(self._adapters) if adapter and slot not in self._closed}
        assert opened == self._slots
        assert all(self._adapters[slot] == adapter for slot, adapter in self.placements.items())
