"""Host memory and disk together: what they are asked for, and what they order."""

from __future__ import annotations

from cached_tables import CachedTables, pack
from quire.config.tiers import TierConfig
from quire.engine.kvcache.prefix_tree import NO_MATCH, Match, Node
from quire.engine.kvcache.tiers.base import Wanted
from quire.engine.kvcache.tiers.shelves import Shelves
from quire.types.transfer import FailedFile, FoundFile, TransferReport

TOKENS = tuple(range(100, 140))
KNOWN = pack(TOKENS)
SIZE = 4


class Device:
    """Shelves behind a prefix tree whose first run is that of TOKENS, with block ids 0, 1 and so on."""

    def __init__(self, config: TierConfig, num_blocks: int = 5) -> None:
        self.cache = CachedTables(16, SIZE)
        self.tree = self.cache.tree
        self.shelves = Shelves(config, self.tree, SIZE)
        node = self.cache.hold(TOKENS[: num_blocks * SIZE]).node
        assert node is not None
        self.run: Node = node
        assert self.run.blocks == list(range(num_blocks))

    def keys(self) -> list[bytes]:
        """The content hashes of the first run's blocks."""
        return [self.tree.key_of(self.run, index) for index in range(len(self.run.blocks))]

    def evict(self, *indices: int) -> None:
        for index in indices:
            self.shelves.evicted(self.run, index)
            self.shelves.check()

    def match(self, num_blocks: int) -> Match:
        return Match(self.run, num_blocks, num_blocks * SIZE) if num_blocks else NO_MATCH


def wanted(limit: int, swapped: int = 0) -> Wanted:
    return Wanted("", KNOWN, limit, swapped)


def test_what_was_evicted_is_found_behind_what_the_device_still_has() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2)
    found = device.shelves.find(device.match(2), wanted(39))
    assert found.num_tokens == 20
    assert [slot.name for slot in found.slots] == device.keys()[2:]
    orders = device.shelves.take_orders(())
    assert [move.block for move in orders.saves] == [4, 3, 2]


def test_a_gap_ends_what_is_found() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 2)
    assert device.shelves.find(device.match(2), wanted(39)).num_tokens == 12
    assert device.shelves.find(device.match(1), wanted(39)).num_tokens == 4


def test_no_more_is_found_than_is_asked_for() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2, 1, 0)
    assert device.shelves.find(NO_MATCH, wanted(11)).num_tokens == 8


def test_another_salt_finds_nothing() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2, 1, 0)
    assert device.shelves.find(NO_MATCH, Wanted("other", KNOWN, 39)).num_tokens == 0


def test_a_swapped_tail_is_found_by_its_exact_length_only() -> None:
    device = Device(TierConfig(8))
    names = device.shelves.keys("", KNOWN, 10)
    assert len(names) == 3
    blocks = dict(zip(names, (7, 8, 9), strict=True))
    assert device.shelves.num_missing(blocks) == 3
    device.shelves.park("me", blocks)
    device.shelves.check()
    assert device.shelves.find(NO_MATCH, wanted(39, swapped=10)).num_tokens == 10
    assert device.shelves.find(NO_MATCH, wanted(39, swapped=9)).num_tokens == 8
    assert device.shelves.find(NO_MATCH, wanted(39)).num_tokens == 8


def test_swapped_blocks_stay_until_their_owner_lets_go_of_them() -> None:
    device = Device(TierConfig(3))
    blocks = dict(zip(device.shelves.keys("", KNOWN, 8), (7, 8), strict=True))
    device.shelves.park("me", blocks)
    device.shelves.take_orders(())
    device.evict(4, 3)
    assert device.shelves.stats().failures == {"host_full": 1}
    assert device.shelves.find(NO_MATCH, wanted(39)).num_tokens == 8
    device.shelves.unpark("me")
    device.shelves.unpark("me")
    device.shelves.take_orders(())
    device.evict(2, 1)
    assert device.shelves.stats().host_held == 2  # what this plan saves


def test_blocks_for_which_host_memory_has_no_room_cannot_be_swapped() -> None:
    device = Device(TierConfig(2))
    assert device.shelves.num_missing(dict.fromkeys(device.shelves.keys("", KNOWN, 12), 0)) is None


def test_a_slot_is_used_once_in_a_plan() -> None:
    device = Device(TierConfig(2))
    device.evict(4, 3, 2)
    orders = device.shelves.take_orders(())
    assert len({move.slot for move in orders.saves}) == len(orders.saves) == 2


def test_what_is_saved_is_written_to_a_file_and_holds_its_slot_until_that_is_done() -> None:
    device = Device(TierConfig(8, "folder", 10))
    device.evict(4, 3)
    orders = device.shelves.take_orders(())
    names = device.keys()[4:2:-1]
    assert [move.key for move in orders.stores] == names
    assert device.shelves.stats().host_held == 2
    device.shelves.take_report(TransferReport(stored=(names[0],), failed=(FailedFile(names[1], "io"),)))
    device.shelves.check()
    assert device.shelves.stats().host_held == 0
    assert device.shelves.stats().disk_used == 1
    assert device.shelves.stats().failures == {"io": 1}


def test_files_that_were_found_are_fetched_and_then_loaded() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    names = device.shelves.keys("", KNOWN, 16)
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert device.shelves.find_files(device.match(2), wanted(39)) == names[2:]
    device.shelves.fetch(names[2:])
    orders = device.shelves.take_orders(())
    assert [move.key for move in orders.fetches] == names[2:]
    assert device.shelves.find(device.match(2), wanted(39)).num_tokens == 8
    device.shelves.take_report(TransferReport(fetched=(names[2],), failed=(FailedFile(names[3], "corrupt"),)))
    device.shelves.check()
    found = device.shelves.find(device.match(2), wanted(39))
    assert found.num_tokens == 12
    assert found.slots[0].read() == "disk"
    assert device.shelves.find_files(device.match(2), wanted(39)) == []


def test_resetting_takes_back_what_was_not_ordered_yet_and_deletes_the_rest() -> None:
    device = Device(TierConfig(8, "folder", 10))
    device.evict(4)
    device.shelves.take_orders(())
    device.evict(3)
    device.shelves.reset()
    device.shelves.check()
    orders = device.shelves.take_orders(())
    assert not orders.saves
    assert not orders.stores
    assert set(orders.drops) == {*device.keys()[3:]}
    device.shelves.take_report(TransferReport(stored=(device.keys()[4],)))
    device.shelves.check()
    assert device.shelves.stats().host_held == 0
    assert device.shelves.find(device.match(3), wanted(39)).num_tokens == 12


def test_resetting_deletes_files_that_are_found_later_too() -> None:
    device = Device(TierConfig(8, "folder", 10))
    names = device.shelves.keys("", KNOWN, 16)
    device.shelves.take_report(TransferReport(found=(FoundFile(names[0], 2.0),)))
    device.shelves.reset()
    assert device.shelves.has_orders
    orders = device.shelves.take_orders(())
    assert (orders.drops, orders.drops_found) == ((names[0],), True)
    assert not device.shelves.has_orders
    device.evict(1)  # and is written again
    device.shelves.take_orders(())
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names[1:])))
    orders = device.shelves.take_orders(())
    assert (orders.drops, orders.drops_found) == ((names[2], names[3]), False)
    assert device.shelves.stats().disk_used == 1
    device.shelves.check()


def test_without_a_disk_resetting_orders_nothing() -> None:
    device = Device(TierConfig(8))
    device.shelves.reset()
    assert not device.shelves.has_orders


def test_writing_through_saves_what_is_kept() -> None:
    device = Device(TierConfig(8, write="through"))
    device.shelves.kept(device.run, 3)
    assert device.shelves.has_orders
    assert [move.block for move in device.shelves.take_orders(()).saves] == [3, 4]
    assert not device.shelves.has_orders


def test_resetting_holds_no_slot_for_what_is_not_saved_any_longer() -> None:
    device = Device(TierConfig(8, write="through"))
    device.shelves.kept(device.run, 0)
    device.shelves.reset()
    device.shelves.check()
    assert not device.shelves.has_orders
    assert device.shelves.stats().host_held == 0


def order_of_use(device: Device) -> list[int]:
    """The tree's blocks that are idle in host memory, the one that is given away first comes first."""
    names = device.keys()
    return [names.index(slot.name) for slot in device.shelves._host._idle if slot.name is not None]


def test_the_first_blocks_of_a_prefix_leave_host_memory_after_those_that_follow() -> None:
    device = Device(TierConfig(8, write="through"))
    device.shelves.kept(device.run, 0)
    assert [move.block for move in device.shelves.take_orders(()).saves] == [0, 1, 2, 3, 4]  # as far as there is room
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    found = device.shelves.find(device.match(0), wanted(39))
    for slot in reversed(found.slots):
        device.shelves.hold(slot)
    device.shelves.take_orders(())
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    device.shelves.kept(device.run, 0)
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    device.shelves.kept(device.run, 3)
    assert order_of_use(device) == [2, 1, 0, 4, 3]
    device.evict(4, 3, 2)  # found where they are, and used
    assert order_of_use(device) == [1, 0, 4, 3, 2]
    device.evict(1, 0)
    assert order_of_use(device) == [4, 3, 2, 1, 0]


def test_the_first_of_fetched_blocks_leaves_host_memory_last() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=4)
    names = device.shelves.keys("", KNOWN, 16)
    device.shelves.take_report(
        TransferReport(found=tuple(FoundFile(name, 9.0 - age) for age, name in enumerate(names)))
    )
    assert device.shelves.fetch(names) == []
    assert list(device.shelves._files.shelf._files) == names[::-1]
    device.shelves.take_report(TransferReport(fetched=tuple(names)))
    device.shelves.let_go(names)
    assert order_of_use(device) == [3, 2, 1, 0]


def test_an_owner_that_swaps_twice_loses_nothing_and_gives_all_back_at_once() -> None:
    device = Device(TierConfig(8))
    names = device.shelves.keys("", KNOWN, 16)
    device.shelves.park("me", dict(zip(names[:2], range(2), strict=True)))
    device.shelves.park("me", dict(zip(names, range(4), strict=True)))
    device.shelves.take_orders(())
    device.shelves.check()
    assert device.shelves.stats().host_held == 4
    device.shelves.unpark("me")
    device.shelves.check()
    assert device.shelves.stats().host_held == 0
    assert order_of_use(device) == [3, 2, 1, 0]


def test_a_file_that_comes_when_nobody_waits_for_it_any_longer_holds_no_slot() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    names = device.shelves.keys("", KNOWN, 16)
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert device.shelves.fetch(names[2:]) == []
    device.shelves.take_orders(())
    device.shelves.take_report(TransferReport(fetched=(names[2],)))
    assert device.shelves.stats().host_held == 2
    device.shelves.let_go(names)
    device.shelves.take_report(TransferReport(fetched=(names[3],)))
    device.shelves.check()
    assert device.shelves.stats().host_held == 0
    assert device.shelves.stats().host_used == 2


def test_files_beyond_half_of_the_slots_wait_until_others_were_used() -> None:
    device = Device(TierConfig(4, "folder", 10), num_blocks=1)
    names = device.shelves.keys("", KNOWN, 20)
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    left = device.shelves.fetch(names[1:])
    assert left == names[3:]
    device.shelves.take_orders(())
    device.shelves.take_report(TransferReport(fetched=tuple(names[1:3])))
    assert device.shelves.fetch(left) == left
    device.shelves.let_go(names[1:3])
    assert device.shelves.fetch(left) == []


def carry_out(device: Device) -> None:
    """Everything that is ordered happens."""
    orders = device.shelves.take_orders(())
    stored, fetched = (tuple(move.key for move in moves) for moves in (orders.stores, orders.fetches))
    device.shelves.take_report(TransferReport(num_saved=len(orders.saves), stored=stored, fetched=fetched))
    device.shelves.check()


def test_a_file_drives_out_nothing_that_leads_to_it() -> None:
    device = Device(TierConfig(4, "folder", 100))
    for index in (4, 3, 2, 1, 0):
        device.evict(index)
        carry_out(device)
    assert device.shelves.find(NO_MATCH, wanted(39)).num_tokens == 16
    assert device.shelves.find_files(NO_MATCH, wanted(39)) == []  # for the fifth block there is no slot but theirs
    assert device.shelves.find(NO_MATCH, wanted(39)).num_tokens == 16


def test_a_file_drives_out_other_blocks_before_those_it_is_read_for() -> None:
    device = Device(TierConfig(4, "folder", 100), num_blocks=3)
    for index in (2, 1, 0):
        device.evict(index)
        carry_out(device)
    others = device.cache.hold(range(8)).node
    assert others is not None
    for index in range(2):  # they drive out the last block and are used later than the others
        device.shelves.evicted(others, index)
        carry_out(device)
    names = device.shelves.find_files(NO_MATCH, wanted(39))
    assert names == [device.keys()[2]]
    assert device.shelves.fetch(names) == []
    carry_out(device)
    assert device.shelves.find(NO_MATCH, wanted(39)).num_tokens == 12


def test_no_more_files_are_looked_for_than_can_be_held_at_once() -> None:
    device = Device(TierConfig(4, "folder", 10), num_blocks=1)
    names = device.shelves.keys("", KNOWN, 20)
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    assert device.shelves.find_files(device.match(1), wanted(39)) == names[1:3]


def test_a_file_that_comes_when_its_block_was_saved_meanwhile_is_not_needed() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    names = device.shelves.keys("", KNOWN, 8)
    device.shelves.take_report(TransferReport(found=tuple(FoundFile(name, 1.0) for name in names)))
    device.shelves.fetch(names[1:])
    device.shelves.take_orders(())
    device.evict(1)
    device.shelves.take_orders(())
    device.shelves.take_report(TransferReport(fetched=(names[1],)))
    device.shelves.check()
    assert device.shelves.stats().host_used == 1
    assert device.shelves.stats().host_held == 0
