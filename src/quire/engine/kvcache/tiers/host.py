"""The host tier: which slot of host memory holds which KV block, and which slot is reused next."""

from __future__ import annotations

from collections import OrderedDict


class Slot:
    """The place of one KV block in host memory. `key` is the content hash of its block; None: lookups find no block in
    it."""

    __slots__ = ("holds", "key", "number", "source")

    def __init__(self, number: int) -> None:
        self.number = number
        self.key: bytes | None = None
        self.holds = 0  # reasons not to reuse the slot
        self.source = "host"  # "disk", "remote": its block came from there and has not been loaded since

    def take_source(self) -> str:
        """Return the tier that a load of this slot counts for: the tier from which the block was fetched for the first
        load after a fetch, otherwise "host"."""
        tier, self.source = self.source, "host"
        return tier


class HostTier:
    """Indexes the slots by key, and keeps the idle ones (with a key and without holds) in order of use.

    When no slot is free, the least recently used idle slot is evicted.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot(number) for number in range(num_slots)]
        self._free = self._slots[::-1]
        self._by_key: dict[bytes, Slot] = {}
        self._idle: OrderedDict[Slot, None] = OrderedDict()  # least recently used first
        self.num_evicted = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_used(self) -> int:
        """Slots that hold a block that can be found."""
        return len(self._by_key)

    @property
    def num_held(self) -> int:
        """Slots with at least one hold."""
        return len(self._slots) - len(self._free) - len(self._idle)

    @property
    def num_holds(self) -> int:
        """Holds on all slots together."""
        return sum(slot.holds for slot in self._slots)

    @property
    def num_available(self) -> int:
        """Slots that `take` could return: free and idle ones."""
        return len(self._free) + len(self._idle)

    def find(self, key: bytes) -> Slot | None:
        return self._by_key.get(key)

    def is_idle(self, key: bytes) -> bool:
        slot = self._by_key.get(key)
        return slot is not None and slot in self._idle

    def take(self) -> Slot | None:
        """Take a slot, with one hold and no key, and evict its block if need be. None: all slots are held."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot = next(iter(self._idle))
            self.num_evicted += 1
            self._remove_key(slot)
        else:
            return None
        slot.holds, slot.source = 1, "host"
        return slot

    def assign(self, slot: Slot, key: bytes) -> None:
        """Set the key of a held slot, so that its block can be found. No other slot may have that key."""
        assert slot.holds
        assert slot.key is None
        assert key not in self._by_key
        slot.key = key
        self._by_key[key] = slot

    def hold(self, slot: Slot) -> Slot:
        """Add a hold to a slot: it is not reused before `release`."""
        self._idle.pop(slot, None)
        slot.holds += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Remove a hold from a slot and mark it as used."""
        slot.holds -= 1
        if slot.holds == 0:
            if slot.key is None:
                self._free.append(slot)
            else:
                self._idle[slot] = None

    def touch(self, slot: Slot) -> None:
        """Mark a slot as used."""
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def use(self, key: bytes) -> Slot:
        """Return the slot with this key, which must be there, and mark it as used."""
        slot = self._by_key[key]
        self.touch(slot)
        return slot

    def forget(self, slot: Slot) -> None:
        """Remove a slot's key, so that its block is not found again. The slot is free once it has no holds."""
        was_idle = slot in self._idle
        self._remove_key(slot)
        if was_idle:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all blocks. Holds stay."""
        for slot in list(self._by_key.values()):
            self.forget(slot)

    def _remove_key(self, slot: Slot) -> None:
        self._idle.pop(slot, None)
        if slot.key is not None:
            del self._by_key[slot.key]
            slot.key = None

    def check(self) -> None:
        assert all(self._by_key[key].key == key for key in self._by_key)
        assert {slot for slot in self._slots if slot.key is not None} == set(self._by_key.values())
        assert set(self._idle) == {slot for slot in self._slots if slot.key is not None and not slot.holds}
        assert set(self._free) == {slot for slot in self._slots if slot.key is None and not slot.holds}
        assert len(set(self._free)) == len(self._free)
        assert min((slot.holds for slot in self._slots), default=0) >= 0
