"""The shelf in host memory: which slot holds which block's bytes, and which may be used for others."""

from __future__ import annotations


class Slot:
    """A block's place in host memory. `name` is None while it holds nothing that can be found."""

    __slots__ = ("from_disk", "holds", "name", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.name: bytes | None = None
        self.holds = 0  # reasons not to use it for something else
        self.from_disk = False  # its content was fetched, and nobody has read it since

    def read(self) -> str:
        """It is loaded: says which tier that is thanks to, the disk for what a file was read for."""
        tier, self.from_disk = ("disk" if self.from_disk else "host"), False
        return tier


class HostShelf:
    """Slots by the names of what they hold, and those that nobody holds in order of use.

    A named slot that is not held is given away when none is free, least recently used first.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot(number) for number in range(num_slots)]
        self._free = self._slots[::-1]
        self._named: dict[bytes, Slot] = {}
        self._idle: dict[Slot, None] = {}  # named and not held, least recently used first
        self.num_evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._named

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_used(self) -> int:
        """Slots that hold a block which can be found."""
        return len(self._named)

    @property
    def num_held(self) -> int:
        return len(self._slots) - len(self._free) - len(self._idle)

    @property
    def num_holds(self) -> int:
        """Reasons to hold a slot, all slots together."""
        return sum(slot.holds for slot in self._slots)

    @property
    def num_available(self) -> int:
        """Slots that can be taken."""
        return len(self._free) + len(self._idle)

    def find(self, name: bytes) -> Slot | None:
        return self._named.get(name)

    def is_idle(self, name: bytes) -> bool:
        slot = self._named.get(name)
        return slot is not None and slot in self._idle

    def take(self) -> Slot | None:
        """A slot without a name, held by the caller; None if all are held."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot = next(iter(self._idle))
            self.num_evicted += 1
            self._unname(slot)
        else:
            return None
        slot.holds, slot.from_disk = 1, False
        return slot

    def name(self, slot: Slot, name: bytes) -> None:
        """A held slot has this content from now on; nothing else may have it."""
        assert slot.holds
        assert slot.name is None
        assert name not in self._named
        slot.name = name
        self._named[name] = slot

    def hold(self, slot: Slot) -> Slot:
        """One more reason not to give it away."""
        self._idle.pop(slot, None)
        slot.holds += 1
        return slot

    def release(self, slot: Slot) -> None:
        """One reason less. It was used just now."""
        slot.holds -= 1
        if slot.holds == 0:
            if slot.name is None:
                self._free.append(slot)
            else:
                self._idle[slot] = None

    def touch(self, slot: Slot) -> None:
        """It was used just now."""
        if slot in self._idle:
            del self._idle[slot]
            self._idle[slot] = None

    def forget(self, slot: Slot) -> None:
        """Its content is not to be found again; it is free once nobody holds it."""
        was_idle = slot in self._idle
        self._unname(slot)
        if was_idle:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all content."""
        for slot in list(self._named.values()):
            self.forget(slot)

    def _unname(self, slot: Slot) -> None:
        self._idle.pop(slot, None)
        if slot.name is not None:
            del self._named[slot.name]
            slot.name = None

    def check(self) -> None:
        assert all(self._named[name].name == name for name in self._named)
        assert {slot for slot in self._slots if slot.name is not None} == set(self._named.values())
        assert set(self._idle) == {slot for slot in self._slots if slot.name is not None and not slot.holds}
        assert set(self._free) == {slot for slot in self._slots if slot.name is None and not slot.holds}
        assert len(set(self._free)) == len(self._free)
        assert min((slot.holds for slot in self._slots), default=0) >= 0
