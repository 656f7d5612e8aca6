"""The index of the disk tier."""

from __future__ import annotations

from quire.engine.kvcache.tiers.disk import DiskIndex
from quire.types.transfer import FoundFile


def test_a_file_too_many_drives_out_the_one_used_least_recently() -> None:
    index = DiskIndex(2)
    assert index.add(b"a") is None
    assert index.add(b"b") is None
    index.touch(b"a")
    assert index.add(b"c") == b"b"
    index.check()
    assert len(index) == 2


def test_files_of_an_earlier_process_go_before_new_ones_and_the_oldest_first() -> None:
    index = DiskIndex(3)
    index.add(b"new")
    assert index.add_found([FoundFile(b"old", 1.0), FoundFile(b"older", 0.5), FoundFile(b"newer", 2.0)]) == [b"older"]
    assert index.add(b"x") == b"old"
    assert index.add(b"y") == b"newer"
    assert index.add(b"z") == b"new"


def test_files_of_a_later_report_go_before_those_of_an_earlier_one() -> None:
    index = DiskIndex(3)
    assert index.add_found([FoundFile(b"newest", 9.0), FoundFile(b"newer", 8.0)]) == []
    assert index.add_found([FoundFile(b"old", 7.0), FoundFile(b"older", 6.0)]) == [b"older"]
    assert [index.add(key) for key in (b"x", b"y", b"z")] == [b"old", b"newer", b"newest"]


def test_files_of_a_model_with_larger_blocks_take_their_room_until_they_go() -> None:
    """However the files of two models follow each other, they take no more bytes than the quota."""
    index = DiskIndex(100)
    large = [FoundFile(b"large %d" % number, float(number), 10) for number in range(12)]
    assert index.add_found(large) == [b"large 0", b"large 1"]
    assert index.num_used == 100
    evicted = []
    for number in range(25):
        evicted.append(index.add(b"small %d" % number))
        index.check()
    assert [key for key in evicted if key] == [b"large 2", b"large 3", b"large 4"]
    index.forget(b"large 5")
    index.forget(b"nothing")
    assert index.num_used == 85
    assert len(index.clear()) == 31
    assert index.num_used == 0
    index.check()


def test_a_file_that_is_known_is_not_found_again() -> None:
    index = DiskIndex(2)
    index.add(b"a")
    assert index.add_found([FoundFile(b"a", 1.0)]) == []
    assert len(index) == 1


def test_a_full_disk_holds_no_more_than_it_does_for_a_while_but_never_nothing() -> None:
    index = DiskIndex(10)
    index.add(b"a")
    index.add(b"b")
    index.on_disk_full()
    assert index.add(b"c") == b"a"
    index.clear()
    index.on_disk_full()
    assert [index.add(key) for key in (b"d", b"e")] == [None, b"d"]
    assert index.quota == 10


def test_a_disk_that_takes_files_again_is_filled_up_to_its_quota() -> None:
    index = DiskIndex(20)
    index.add(b"a")
    index.on_disk_full()
    sizes = []
    for number in range(400):
        index.add(bytes([number // 256, number % 256]))
        index.on_written()
        index.check()
        sizes.append(len(index))
    assert sizes[:8] == [1] * 8
    assert sizes == sorted(sizes)
    assert sizes[-1] == 20


def test_a_disk_that_stays_full_is_tried_now_and_then() -> None:
    index, room, failures = DiskIndex(1_000), 30, 0
    for number in range(600):
        index.add(bytes([number // 256, number % 256]))
        if len(index) > room:
            failures += 1
            index.forget(bytes([number // 256, number % 256]))
            index.on_disk_full()
        else:
            index.on_written()
    assert 0 < failures < 80
