"""Host memory and disk together: what they are asked for, and what they order."""

from __future__ import annotations

from quire.config.tiers import TierConfig
from quire.engine.kvcache.prefixes import NO_MATCH, Match
from quire.engine.kvcache.radix import Node, PrefixTree
from quire.engine.kvcache.tiers.base import Wanted
from quire.engine.kvcache.tiers.shelves import Shelves
from quire.types.transfer import FailedFile, FoundFile, TransferReport

TOKENS = tuple(range(100, 140))
SIZE = 4


def known(start: int, stop: int) -> tuple[int, ...]:
    return TOKENS[start:stop]


class Desk:
    """Shelves, and a tree whose first branch is TOKENS."""

    def __init__(self, config: TierConfig, num_blocks: int = 5) -> None:
        self.tree = PrefixTree(SIZE)
        self.shelves = Shelves(config, self.tree, SIZE)
        keys = self.tree.keys(0, "", TOKENS[: num_blocks * SIZE])
        self.nodes: list[Node] = list(self.tree.grow(self.tree.root, keys, range(num_blocks)))

    def evict(self, *indices: int) -> None:
        for index in indices:
            self.shelves.evicted(self.nodes[index])
            self.shelves.check()

    def match(self, num_blocks: int) -> Match:
        return Match(tuple(self.nodes[:num_blocks]), num_blocks * SIZE) if num_blocks else NO_MATCH


def wanted(limit: int, parked: int = 0) -> Wanted:
    return Wanted("", known, limit, parked)


def test_what_was_evicted_is_found_behind_what_the_device_still_has() -> None:
    desk = Desk(TierConfig(8))
    desk.evict(4, 3, 2)
    found = desk.shelves.find(desk.match(2), wanted(39))
    assert found.num_tokens == 20
    assert [slot.name for slot in found.slots] == [desk.tree.key_of(node) for node in desk.nodes[2:]]
    orders = desk.shelves.take_orders(())
    assert [move.block for move in orders.saves] == [4, 3, 2]


def test_a_gap_ends_what_is_found() -> None:
    desk = Desk(TierConfig(8))
    desk.evict(4, 2)
    assert desk.shelves.find(desk.match(2), wanted(39)).num_tokens == 12
    assert desk.shelves.find(desk.match(1), wanted(39)).num_tokens == 4


def test_no_more_is_found_than_is_asked_for() -> None:
    desk = Desk(TierConfig(8))
    desk.evict(4, 3, 2, 1, 0)
    assert desk.shelves.find(NO_MATCH, wanted(11)).num_tokens == 8


def test_another_salt_finds_nothing() -> None:
    desk = Desk(TierConfig(8))
    desk.evict(4, 3, 2, 1, 0)
    assert desk.shelves.find(NO_MATCH, Wanted("other", known, 39)).num_tokens == 0


def test_a_parked_tail_is_found_by_its_exact_length_only() -> None:
    desk = Desk(TierConfig(8))
    names = desk.shelves.names("", known, 10)
    assert len(names) == 3
    blocks = dict(zip(names, (7, 8, 9), strict=True))
    assert desk.shelves.num_missing(blocks) == 3
    desk.shelves.park("me", blocks)
    desk.shelves.check()
    assert desk.shelves.find(NO_MATCH, wanted(39, parked=10)).num_tokens == 10
    assert desk.shelves.find(NO_MATCH, wanted(39, parked=9)).num_tokens == 8
    assert desk.shelves.find(NO_MATCH, wanted(39)).num_tokens == 8


def test_parked_blocks_stay_until_they_are_unparked() -> None:
    desk = Desk(TierConfig(3))
    blocks = dict(zip(desk.shelves.names("", known, 8), (7, 8), strict=True))
    desk.shelves.park("me", blocks)
    desk.shelves.take_orders(())
    desk.evict(4, 3)
    assert desk.shelves.stats().failures == {"host_full": 1}
    assert desk.shelves.find(NO_MATCH, wanted(39)).num_tokens == 8
    desk.shelves.unpark("me")
    desk.shelves.unpark("me")
    desk.shelves.take_orders(())
    desk.evict(2, 1)
    assert desk.shelves.stats().host_held == 2  # what this plan saves


def test_blocks_for_which_there_is_no_room_cannot_be_parked() -> None:
    desk = Desk(TierConfig(2))
    assert desk.shelves.num_missing(dict.fromkeys(desk.shelves.names("", known, 12), 0)) is None


def test_a_slot_is_used_once_in_a_plan() -> None:
    desk = Desk(TierConfig(2))
    desk.evict(4, 3, 2)
    orders = desk.shelves.take_orders(())
    assert len({move.slot for move in orders.saves}) == len(orders.saves) == 2


def test_what_is_saved_is_written_to_a_file_and_holds_its_slot_until_that_is_done() -> None:
    desk = Desk(TierConfig(8, "folder", 10))
    desk.evict(4, 3)
    orders = desk.shelves.take_orders(())
    names = [desk.tree.key_of(desk.nodes[index]) for index in (4, 3)]
    assert [move.key for move in orders.stores] == names
    assert desk.shelves.stats().host_held == 2
    desk.shelves.take_report(TransferReport(stored=(names[0],), failed=(FailedFile(names[1], "io"),)))
    desk.shelves.check()
    assert desk.shelves.stats().host_held == 0
    assert desk.shelves.stats().disk_used == 1
    assert desk.shelves.stats().failures == {"io": 1}


def test_files_that_were_found_are_fetched_and_then_loaded() -> None:
    desk = Desk(TierConfig(8, "folder", 10), num_blocks=2)
    names = desk.shelves.names("", known, 16)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert desk.shelves.find_files(desk.match(2), wanted(39)) == names[2:]
    desk.shelves.fetch(names[2:])
    orders = desk.shelves.take_orders(())
    assert [move.key for move in orders.fetches] == names[2:]
    assert desk.shelves.find(desk.match(2), wanted(39)).num_tokens == 8
    desk.shelves.take_report(TransferReport(fetched=(names[2],), failed=(FailedFile(names[3], "corrupt"),)))
    desk.shelves.check()
    found = desk.shelves.find(desk.match(2), wanted(39))
    assert found.num_tokens == 12
    assert found.slots[0].read() == "disk"
    assert desk.shelves.find_files(desk.match(2), wanted(39)) == []


def test_resetting_takes_back_what_was_not_ordered_yet_and_deletes_the_rest() -> None:
    desk = Desk(TierConfig(8, "folder", 10))
    desk.evict(4)
    desk.shelves.take_orders(())
    desk.evict(3)
    desk.shelves.reset()
    desk.shelves.check()
    orders = desk.shelves.take_orders(())
    assert not orders.saves
    assert not orders.stores
    assert set(orders.drops) == {desk.tree.key_of(desk.nodes[index]) for index in (4, 3)}
    desk.shelves.take_report(TransferReport(stored=(desk.tree.key_of(desk.nodes[4]),)))
    desk.shelves.check()
    assert desk.shelves.stats().host_held == 0
    assert desk.shelves.find(desk.match(3), wanted(39)).num_tokens == 12


def test_resetting_deletes_files_that_are_found_later_too() -> None:
    desk = Desk(TierConfig(8, "folder", 10))
    names = desk.shelves.names("", known, 16)
    desk.shelves.take_report(TransferReport(found=(FoundFile(names[0], 2.0),)))
    desk.shelves.reset()
    assert desk.shelves.has_orders
    orders = desk.shelves.take_orders(())
    assert (orders.drops, orders.drops_found) == ((names[0],), True)
    assert not desk.shelves.has_orders
    desk.evict(1)  # and is written again
    desk.shelves.take_orders(())
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names[1:])))
    orders = desk.shelves.take_orders(())
    assert (orders.drops, orders.drops_found) == ((names[2], names[3]), False)
    assert desk.shelves.stats().disk_used == 1
    desk.shelves.check()


def test_without_a_disk_resetting_orders_nothing() -> None:
    desk = Desk(TierConfig(8))
    desk.shelves.reset()
    assert not desk.shelves.has_orders


def test_writing_through_saves_what_is_kept() -> None:
    desk = Desk(TierConfig(8, write="through"))
    desk.shelves.kept(desk.nodes[:2])
    assert desk.shelves.has_orders
    assert len(desk.shelves.take_orders(()).saves) == 2
    assert not desk.shelves.has_orders


def test_resetting_holds_no_slot_for_what_is_not_saved_any_longer() -> None:
    desk = Desk(TierConfig(8, write="through"))
    desk.shelves.kept(desk.nodes)
    desk.shelves.reset()
    desk.shelves.check()
    assert not desk.shelves.has_orders
    assert desk.shelves.stats().host_held == 0


def order_of_use(desk: Desk) -> list[int]:
    """The tree's blocks that are idle in host memory, the one that goes first first."""
    names = [desk.tree.key_of(node) for node in desk.nodes]
    return [names.index(slot.name) for slot in desk.shelves._host._idle if slot.name is not None]


def test_who_leads_to_others_goes_after_them() -> None:
    desk = Desk(TierConfig(8, write="through"))
    desk.shelves.kept(desk.nodes)
    assert [move.block for move in desk.shelves.take_orders(()).saves] == [0, 1, 2, 3, 4]  # as far as there is room
    assert order_of_use(desk) == [4, 3, 2, 1, 0]
    found = desk.shelves.find(desk.match(0), wanted(39))
    for slot in reversed(found.slots):
        desk.shelves.hold(slot)
    desk.shelves.take_orders(())
    assert order_of_use(desk) == [4, 3, 2, 1, 0]
    desk.shelves.kept(desk.nodes[:2])
    assert order_of_use(desk) == [4, 3, 2, 1, 0]
    desk.shelves.kept(desk.nodes[3:])
    desk.evict(4, 3, 2)  # found where they are, and used
    assert order_of_use(desk) == [1, 0, 4, 3, 2]
    desk.evict(1, 0)
    assert order_of_use(desk) == [4, 3, 2, 1, 0]


def test_the_first_of_fetched_files_goes_last() -> None:
    desk = Desk(TierConfig(8, "folder", 10), num_blocks=4)
    names = desk.shelves.names("", known, 16)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 9.0 - age) for age, name in enumerate(names))))
    assert desk.shelves.fetch(names) == []
    assert list(desk.shelves._files.shelf._files) == names[::-1]
    desk.shelves.take_report(TransferReport(fetched=tuple(names)))
    desk.shelves.let_go(names)
    assert order_of_use(desk) == [3, 2, 1, 0]


def test_who_parks_twice_loses_nothing_and_gives_all_back_at_once() -> None:
    desk = Desk(TierConfig(8))
    names = desk.shelves.names("", known, 16)
    desk.shelves.park("me", dict(zip(names[:2], range(2), strict=True)))
    desk.shelves.park("me", dict(zip(names, range(4), strict=True)))
    desk.shelves.take_orders(())
    desk.shelves.check()
    assert desk.shelves.stats().host_held == 4
    desk.shelves.unpark("me")
    desk.shelves.check()
    assert desk.shelves.stats().host_held == 0
    assert order_of_use(desk) == [3, 2, 1, 0]


def test_a_file_that_comes_when_nobody_waits_for_it_any_longer_holds_no_slot() -> None:
    desk = Desk(TierConfig(8, "folder", 10), num_blocks=2)
    names = desk.shelves.names("", known, 16)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert desk.shelves.fetch(names[2:]) == []
    desk.shelves.take_orders(())
    desk.shelves.take_report(TransferReport(fetched=(names[2],)))
    assert desk.shelves.stats().host_held == 2
    desk.shelves.let_go(names)
    desk.shelves.take_report(TransferReport(fetched=(names[3],)))
    desk.shelves.check()
    assert desk.shelves.stats().host_held == 0
    assert desk.shelves.stats().host_used == 2


def test_files_beyond_half_of_the_slots_wait_until_others_were_used() -> None:
    desk = Desk(TierConfig(4, "folder", 10), num_blocks=1)
    names = desk.shelves.names("", known, 20)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    left = desk.shelves.fetch(names[1:])
    assert left == names[3:]
    desk.shelves.take_orders(())
    desk.shelves.take_report(TransferReport(fetched=tuple(names[1:3])))
    assert desk.shelves.fetch(left) == left
    desk.shelves.let_go(names[1:3])
    assert desk.shelves.fetch(left) == []


def carry_out(desk: Desk) -> None:
    """Everything that is ordered happens."""
    orders = desk.shelves.take_orders(())
    stored, fetched = (tuple(move.key for move in moves) for moves in (orders.stores, orders.fetches))
    desk.shelves.take_report(TransferReport(num_saved=len(orders.saves), stored=stored, fetched=fetched))
    desk.shelves.check()


def test_a_file_drives_out_nothing_that_leads_to_it() -> None:
    desk = Desk(TierConfig(4, "folder", 100))
    for index in (4, 3, 2, 1, 0):
        desk.evict(index)
        carry_out(desk)
    assert desk.shelves.find(NO_MATCH, wanted(39)).num_tokens == 16
    assert desk.shelves.find_files(NO_MATCH, wanted(39)) == []  # for the fifth block there is no slot but theirs
    assert desk.shelves.find(NO_MATCH, wanted(39)).num_tokens == 16


def test_a_file_drives_out_other_blocks_before_those_it_is_read_for() -> None:
    desk = Desk(TierConfig(4, "folder", 100), num_blocks=3)
    for index in (2, 1, 0):
        desk.evict(index)
        carry_out(desk)
    others = desk.tree.grow(desk.tree.root, desk.tree.keys(0, "", range(8)), (7, 8))
    for node in others:  # they drive out the last block and are used later than the others
        desk.shelves.evicted(node)
        carry_out(desk)
    names = desk.shelves.find_files(NO_MATCH, wanted(39))
    assert names == [desk.tree.key_of(desk.nodes[2])]
    assert desk.shelves.fetch(names) == []
    carry_out(desk)
    assert desk.shelves.find(NO_MATCH, wanted(39)).num_tokens == 12


def test_no_more_files_are_looked_for_than_can_be_held_at_once() -> None:
    desk = Desk(TierConfig(4, "folder", 10), num_blocks=1)
    names = desk.shelves.names("", known, 20)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert desk.shelves.find_files(desk.match(1), wanted(39)) == names[1:3]


def test_a_file_that_comes_when_its_block_was_saved_meanwhile_is_not_needed() -> None:
    desk = Desk(TierConfig(8, "folder", 10), num_blocks=2)
    names = desk.shelves.names("", known, 8)
    desk.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    desk.shelves.fetch(names[1:])
    desk.shelves.take_orders(())
    desk.evict(1)
    desk.shelves.take_orders(())
    desk.shelves.take_report(TransferReport(fetched=(names[1],)))
    desk.shelves.check()
    assert desk.shelves.stats().host_used == 1
    assert desk.shelves.stats().host_held == 0
