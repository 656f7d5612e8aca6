"""Host memory and disk together: what they are asked for, and what they order."""

from __future__ import annotations

from cached_tables import CachedTables, pack
from quire.config.tiers import TierConfig
from quire.engine.kvcache.prefix_tree import NO_MATCH, Match, Node
from quire.engine.kvcache.tiers.base import TierQuery
from quire.engine.kvcache.tiers.manager import TierManager
from quire.types.transfer import FailedFile, FoundFile, TransferReport

TOKENS = tuple(range(100, 140))
KNOWN = pack(TOKENS)
SIZE = 4


class Device:
    """A tier manager behind a prefix tree whose first run is that of TOKENS, with block ids 0, 1 and so on."""

    def __init__(self, config: TierConfig, num_blocks: int = 5) -> None:
        self.cache = CachedTables(16, SIZE)
        self.tree = self.cache.tree
        self.tiers = TierManager(config, self.tree, SIZE)
        node = self.cache.hold(TOKENS[: num_blocks * SIZE]).node
        assert node is not None
        self.run: Node = node
        assert self.run.blocks == list(range(num_blocks))

    def keys(self) -> list[bytes]:
        """The content hashes of the first run's blocks."""
        return [self.tree.key_of(self.run, index) for index in range(len(self.run.blocks))]

    def evict(self, *indices: int) -> None:
        for index in indices:
            self.tiers.on_evict(self.run, index)
            self.tiers.check()

    def match(self, num_blocks: int) -> Match:
        return Match(self.run, num_blocks, num_blocks * SIZE) if num_blocks else NO_MATCH


def query(limit: int, swapped: int = 0) -> TierQuery:
    return TierQuery("", KNOWN, limit, swapped)


def test_what_was_evicted_is_found_behind_what_the_device_still_has() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2)
    found = device.tiers.find(device.match(2), query(39))
    assert found.num_tokens == 20
    assert [slot.key for slot in found.slots] == device.keys()[2:]
    transfers = device.tiers.take_transfers(())
    assert [move.block for move in transfers.saves] == [4, 3, 2]


def test_a_gap_ends_what_is_found() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 2)
    assert device.tiers.find(device.match(2), query(39)).num_tokens == 12
    assert device.tiers.find(device.match(1), query(39)).num_tokens == 4


def test_no_more_is_found_than_is_asked_for() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2, 1, 0)
    assert device.tiers.find(NO_MATCH, query(11)).num_tokens == 8


def test_another_salt_finds_nothing() -> None:
    device = Device(TierConfig(8))
    device.evict(4, 3, 2, 1, 0)
    assert device.tiers.find(NO_MATCH, TierQuery("other", KNOWN, 39)).num_tokens == 0


def test_a_swapped_tail_is_found_by_its_exact_length_only() -> None:
    device = Device(TierConfig(8))
    keys = device.tiers.keys("", KNOWN, 10)
    assert len(keys) == 3
    blocks = dict(zip(keys, (7, 8, 9), strict=True))
    assert device.tiers.num_to_save(blocks) == 3
    device.tiers.swap_out("me", blocks)
    device.tiers.check()
    assert device.tiers.find(NO_MATCH, query(39, swapped=10)).num_tokens == 10
    assert device.tiers.find(NO_MATCH, query(39, swapped=9)).num_tokens == 8
    assert device.tiers.find(NO_MATCH, query(39)).num_tokens == 8


def test_swapped_blocks_stay_until_their_owner_lets_go_of_them() -> None:
    device = Device(TierConfig(3))
    blocks = dict(zip(device.tiers.keys("", KNOWN, 8), (7, 8), strict=True))
    device.tiers.swap_out("me", blocks)
    device.tiers.take_transfers(())
    device.evict(4, 3)
    assert device.tiers.stats().failures == {"host_full": 1}
    assert device.tiers.find(NO_MATCH, query(39)).num_tokens == 8
    device.tiers.release_swapped("me")
    device.tiers.release_swapped("me")
    device.tiers.take_transfers(())
    device.evict(2, 1)
    assert device.tiers.stats().host_held == 2  # what this plan saves


def test_blocks_for_which_host_memory_has_no_room_cannot_be_swapped() -> None:
    device = Device(TierConfig(2))
    assert device.tiers.num_to_save(dict.fromkeys(device.tiers.keys("", KNOWN, 12), 0)) is None


def test_a_slot_is_used_once_in_a_plan() -> None:
    device = Device(TierConfig(2))
    device.evict(4, 3, 2)
    transfers = device.tiers.take_transfers(())
    assert len({move.slot for move in transfers.saves}) == len(transfers.saves) == 2


def test_what_is_saved_is_written_to_a_file_and_holds_its_slot_until_that_is_done() -> None:
    device = Device(TierConfig(8, "folder", 10))
    device.evict(4, 3)
    transfers = device.tiers.take_transfers(())
    keys = device.keys()[4:2:-1]
    assert [move.key for move in transfers.stores] == keys
    assert device.tiers.stats().host_held == 2
    device.tiers.apply_report(TransferReport(stored=(keys[0],), failed=(FailedFile(keys[1], "io"),)))
    device.tiers.check()
    assert device.tiers.stats().host_held == 0
    assert device.tiers.stats().disk_used == 1
    assert device.tiers.stats().failures == {"io": 1}


def test_files_that_were_found_are_fetched_and_then_loaded() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    keys = device.tiers.keys("", KNOWN, 16)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys)))
    assert device.tiers.find_files(device.match(2), query(39)) == keys[2:]
    device.tiers.fetch(keys[2:])
    transfers = device.tiers.take_transfers(())
    assert [move.key for move in transfers.fetches] == keys[2:]
    assert device.tiers.find(device.match(2), query(39)).num_tokens == 8
    device.tiers.apply_report(TransferReport(fetched=(keys[2],), failed=(FailedFile(keys[3], "corrupt"),)))
    device.tiers.check()
    found = device.tiers.find(device.match(2), query(39))
    assert found.num_tokens == 12
    assert found.slots[0].take_source() == "disk"
    assert device.tiers.find_files(device.match(2), query(39)) == []


def test_resetting_takes_back_what_was_not_ordered_yet_and_deletes_the_rest() -> None:
    device = Device(TierConfig(8, "folder", 10))
    device.evict(4)
    device.tiers.take_transfers(())
    device.evict(3)
    device.tiers.reset()
    device.tiers.check()
    transfers = device.tiers.take_transfers(())
    assert not transfers.saves
    assert not transfers.stores
    assert set(transfers.drops) == {*device.keys()[3:]}
    device.tiers.apply_report(TransferReport(stored=(device.keys()[4],)))
    device.tiers.check()
    assert device.tiers.stats().host_held == 0
    assert device.tiers.find(device.match(3), query(39)).num_tokens == 12


def test_resetting_deletes_files_that_are_found_later_too() -> None:
    device = Device(TierConfig(8, "folder", 10))
    keys = device.tiers.keys("", KNOWN, 16)
    device.tiers.apply_report(TransferReport(found=(FoundFile(keys[0], 2.0),)))
    device.tiers.reset()
    assert device.tiers.has_transfers
    transfers = device.tiers.take_transfers(())
    assert (transfers.drops, transfers.drops_found) == ((keys[0],), True)
    assert not device.tiers.has_transfers
    device.evict(1)  # and is written again
    device.tiers.take_transfers(())
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys[1:])))
    transfers = device.tiers.take_transfers(())
    assert (transfers.drops, transfers.drops_found) == ((keys[2], keys[3]), False)
    assert device.tiers.stats().disk_used == 1
    device.tiers.check()


def test_without_a_disk_resetting_orders_nothing() -> None:
    device = Device(TierConfig(8))
    device.tiers.reset()
    assert not device.tiers.has_transfers


def test_writing_through_saves_what_is_kept() -> None:
    device = Device(TierConfig(8, write="through"))
    device.tiers.on_publish(device.run, 3)
    assert device.tiers.has_transfers
    assert [move.block for move in device.tiers.take_transfers(()).saves] == [3, 4]
    assert not device.tiers.has_transfers


def test_resetting_holds_no_slot_for_what_is_not_saved_any_longer() -> None:
    device = Device(TierConfig(8, write="through"))
    device.tiers.on_publish(device.run, 0)
    device.tiers.reset()
    device.tiers.check()
    assert not device.tiers.has_transfers
    assert device.tiers.stats().host_held == 0


def order_of_use(device: Device) -> list[int]:
    """The tree's blocks that are idle in host memory, the one that is given away first comes first."""
    keys = device.keys()
    return [keys.index(slot.key) for slot in device.tiers._host._idle if slot.key is not None]


def test_the_first_blocks_of_a_prefix_leave_host_memory_after_those_that_follow() -> None:
    device = Device(TierConfig(8, write="through"))
    device.tiers.on_publish(device.run, 0)
    assert [move.block for move in device.tiers.take_transfers(()).saves] == [0, 1, 2, 3, 4]  # as far as there is room
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    found = device.tiers.find(device.match(0), query(39))
    for slot in reversed(found.slots):
        device.tiers.keep_for_plan(slot)
    device.tiers.take_transfers(())
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    device.tiers.on_publish(device.run, 0)
    assert order_of_use(device) == [4, 3, 2, 1, 0]
    device.tiers.on_publish(device.run, 3)
    assert order_of_use(device) == [2, 1, 0, 4, 3]
    device.evict(4, 3, 2)  # found where they are, and used
    assert order_of_use(device) == [1, 0, 4, 3, 2]
    device.evict(1, 0)
    assert order_of_use(device) == [4, 3, 2, 1, 0]


def test_the_first_of_fetched_blocks_leaves_host_memory_last() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=4)
    keys = device.tiers.keys("", KNOWN, 16)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 9.0 - age) for age, key in enumerate(keys))))
    assert device.tiers.fetch(keys) == []
    assert list(device.tiers._disk.index._files) == keys[::-1]
    device.tiers.apply_report(TransferReport(fetched=tuple(keys)))
    device.tiers.release_fetched(keys)
    assert order_of_use(device) == [3, 2, 1, 0]


def test_an_owner_that_swaps_twice_loses_nothing_and_gives_all_back_at_once() -> None:
    device = Device(TierConfig(8))
    keys = device.tiers.keys("", KNOWN, 16)
    device.tiers.swap_out("me", dict(zip(keys[:2], range(2), strict=True)))
    device.tiers.swap_out("me", dict(zip(keys, range(4), strict=True)))
    device.tiers.take_transfers(())
    device.tiers.check()
    assert device.tiers.stats().host_held == 4
    device.tiers.release_swapped("me")
    device.tiers.check()
    assert device.tiers.stats().host_held == 0
    assert order_of_use(device) == [3, 2, 1, 0]


def test_a_file_that_comes_when_nobody_waits_for_it_any_longer_holds_no_slot() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    keys = device.tiers.keys("", KNOWN, 16)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys)))
    assert device.tiers.fetch(keys[2:]) == []
    device.tiers.take_transfers(())
    device.tiers.apply_report(TransferReport(fetched=(keys[2],)))
    assert device.tiers.stats().host_held == 2
    device.tiers.release_fetched(keys)
    device.tiers.apply_report(TransferReport(fetched=(keys[3],)))
    device.tiers.check()
    assert device.tiers.stats().host_held == 0
    assert device.tiers.stats().host_used == 2


def test_files_beyond_half_of_the_slots_wait_until_others_were_used() -> None:
    device = Device(TierConfig(4, "folder", 10), num_blocks=1)
    keys = device.tiers.keys("", KNOWN, 20)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys)))
    left = device.tiers.fetch(keys[1:])
    assert left == keys[3:]
    device.tiers.take_transfers(())
    device.tiers.apply_report(TransferReport(fetched=tuple(keys[1:3])))
    assert device.tiers.fetch(left) == left
    device.tiers.release_fetched(keys[1:3])
    assert device.tiers.fetch(left) == []


def complete_all(device: Device) -> None:
    """Everything that is ordered happens."""
    transfers = device.tiers.take_transfers(())
    stored, fetched = (tuple(move.key for move in moves) for moves in (transfers.stores, transfers.fetches))
    device.tiers.apply_report(TransferReport(num_saved=len(transfers.saves), stored=stored, fetched=fetched))
    device.tiers.check()


def test_a_file_drives_out_nothing_that_leads_to_it() -> None:
    device = Device(TierConfig(4, "folder", 100))
    for index in (4, 3, 2, 1, 0):
        device.evict(index)
        complete_all(device)
    assert device.tiers.find(NO_MATCH, query(39)).num_tokens == 16
    assert device.tiers.find_files(NO_MATCH, query(39)) == []  # for the fifth block there is no slot but theirs
    assert device.tiers.find(NO_MATCH, query(39)).num_tokens == 16


def test_a_file_drives_out_other_blocks_before_those_it_is_read_for() -> None:
    device = Device(TierConfig(4, "folder", 100), num_blocks=3)
    for index in (2, 1, 0):
        device.evict(index)
        complete_all(device)
    others = device.cache.hold(range(8)).node
    assert others is not None
    for index in range(2):  # they drive out the last block and are used later than the others
        device.tiers.on_evict(others, index)
        complete_all(device)
    keys = device.tiers.find_files(NO_MATCH, query(39))
    assert keys == [device.keys()[2]]
    assert device.tiers.fetch(keys) == []
    complete_all(device)
    assert device.tiers.find(NO_MATCH, query(39)).num_tokens == 12


def test_no_more_files_are_looked_for_than_can_be_held_at_once() -> None:
    device = Device(TierConfig(4, "folder", 10), num_blocks=1)
    keys = device.tiers.keys("", KNOWN, 20)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys)))
    assert device.tiers.find_files(device.match(1), query(39)) == keys[1:3]


def test_a_file_that_comes_when_its_block_was_saved_meanwhile_is_not_needed() -> None:
    device = Device(TierConfig(8, "folder", 10), num_blocks=2)
    keys = device.tiers.keys("", KNOWN, 8)
    device.tiers.apply_report(TransferReport(found=tuple(FoundFile(key, 1.0) for key in keys)))
    device.tiers.fetch(keys[1:])
    device.tiers.take_transfers(())
    device.evict(1)
    device.tiers.take_transfers(())
    device.tiers.apply_report(TransferReport(fetched=(keys[1],)))
    device.tiers.check()
    assert device.tiers.stats().host_used == 1
    assert device.tiers.stats().host_held == 0
