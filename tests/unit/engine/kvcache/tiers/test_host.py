"""The shelf in host memory."""

from __future__ import annotations

import random

from quire.engine.kvcache.tiers.host import HostShelf, Slot


def put(shelf: HostShelf, name: bytes) -> Slot:
    slot = shelf.take()
    assert slot is not None
    shelf.name(slot, name)
    shelf.release(slot)
    shelf.check()
    return slot


def test_what_was_used_least_recently_makes_room_first() -> None:
    shelf = HostShelf(2)
    first = put(shelf, b"a")
    put(shelf, b"b")
    shelf.touch(first)
    put(shelf, b"c")
    assert b"a" in shelf
    assert b"b" not in shelf
    assert shelf.num_evicted == 1


def test_a_slot_that_is_held_is_not_given_away() -> None:
    shelf = HostShelf(2)
    held = shelf.hold(put(shelf, b"a"))
    put(shelf, b"b")
    put(shelf, b"c")
    assert shelf.find(b"a") is held
    assert (shelf.num_held, shelf.num_available) == (1, 1)
    taken = shelf.take()
    assert taken is not None
    assert shelf.take() is None
    shelf.release(taken)
    shelf.release(held)
    shelf.check()
    assert shelf.num_available == 2


def test_a_forgotten_slot_is_free_once_nobody_holds_it() -> None:
    shelf = HostShelf(1)
    slot = shelf.hold(put(shelf, b"a"))
    shelf.forget(slot)
    assert b"a" not in shelf
    assert shelf.num_available == 0
    shelf.release(slot)
    shelf.check()
    assert shelf.num_available == 1


def test_clearing_forgets_everything_and_keeps_holds() -> None:
    shelf = HostShelf(3)
    held = shelf.hold(put(shelf, b"a"))
    put(shelf, b"b")
    shelf.clear()
    shelf.check()
    assert shelf.num_used == 0
    assert shelf.num_available == 2
    shelf.release(held)
    assert shelf.num_available == 3


def test_what_was_fetched_counts_as_read_from_disk_once() -> None:
    slot = Slot(0)
    slot.from_disk = True
    assert [slot.read(), slot.read()] == ["disk", "host"]


def test_owners_agree_after_any_operations() -> None:
    rng = random.Random(5)
    shelf, held = HostShelf(6), list[Slot]()
    for number in range(2_000):
        choice = rng.randrange(5)
        found = shelf.find(bytes([rng.randrange(12)]))
        if choice == 0 and (name := bytes([number % 12])) not in shelf and (slot := shelf.take()) is not None:
            shelf.name(slot, name)
            held.append(slot)
        elif choice == 1 and held:
            shelf.release(held.pop(rng.randrange(len(held))))
        elif choice == 2 and found is not None:
            held.append(shelf.hold(found))
        elif choice == 3 and found is not None:
            shelf.touch(found)
        elif choice == 4 and found is not None and rng.random() < 0.3:
            shelf.forget(found)
        shelf.check()
        assert shelf.num_holds == len(held)
