"""The host tier."""

from __future__ import annotations

import random

from quire.engine.kvcache.tiers.host import HostTier, Slot


def put(host: HostTier, key: bytes) -> Slot:
    slot = host.take()
    assert slot is not None
    host.assign(slot, key)
    host.release(slot)
    host.check()
    return slot


def test_what_was_used_least_recently_makes_room_first() -> None:
    host = HostTier(2)
    first = put(host, b"a")
    put(host, b"b")
    host.touch(first)
    put(host, b"c")
    assert b"a" in host
    assert b"b" not in host
    assert host.num_evicted == 1


def test_a_slot_that_is_held_is_not_given_away() -> None:
    host = HostTier(2)
    held = host.hold(put(host, b"a"))
    put(host, b"b")
    put(host, b"c")
    assert host.find(b"a") is held
    assert (host.num_held, host.num_available) == (1, 1)
    taken = host.take()
    assert taken is not None
    assert host.take() is None
    host.release(taken)
    host.release(held)
    host.check()
    assert host.num_available == 2


def test_a_forgotten_slot_is_free_once_nobody_holds_it() -> None:
    host = HostTier(1)
    slot = host.hold(put(host, b"a"))
    host.forget(slot)
    assert b"a" not in host
    assert host.num_available == 0
    host.release(slot)
    host.check()
    assert host.num_available == 1


def test_clearing_forgets_everything_and_keeps_holds() -> None:
    host = HostTier(3)
    held = host.hold(put(host, b"a"))
    put(host, b"b")
    host.clear()
    host.check()
    assert host.num_used == 0
    assert host.num_available == 2
    host.release(held)
    assert host.num_available == 3


def test_what_was_fetched_counts_as_read_from_disk_once() -> None:
    slot = Slot(0)
    slot.source = "disk"
    assert [slot.take_source(), slot.take_source()] == ["disk", "host"]


def test_owners_agree_after_any_operations() -> None:
    rng = random.Random(5)
    host, held = HostTier(6), list[Slot]()
    for number in range(2_000):
        choice = rng.randrange(5)
        found = host.find(bytes([rng.randrange(12)]))
        if choice == 0 and (key := bytes([number % 12])) not in host and (slot := host.take()) is not None:
            host.assign(slot, key)
            held.append(slot)
        elif choice == 1 and held:
            host.release(held.pop(rng.randrange(len(held))))
        elif choice == 2 and found is not None:
            held.append(host.hold(found))
        elif choice == 3 and found is not None:
            host.touch(found)
        elif choice == 4 and found is not None and rng.random() < 0.3:
            host.forget(found)
        host.check()
        assert host.num_holds == len(held)
