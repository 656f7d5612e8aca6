"""The shelf on disk."""

from __future__ import annotations

from quire.engine.kvcache.tiers.disk import DiskShelf
from quire.types.transfer import FoundFile


def test_a_file_too_many_drives_out_the_one_used_least_recently() -> None:
    shelf = DiskShelf(2)
    assert shelf.add(b"a") is None
    assert shelf.add(b"b") is None
    shelf.touch(b"a")
    assert shelf.add(b"c") == b"b"
    shelf.check()
    assert len(shelf) == 2


def test_files_of_an_earlier_process_go_before_new_ones_and_the_oldest_first() -> None:
    shelf = DiskShelf(3)
    shelf.add(b"new")
    assert shelf.found([FoundFile(b"old", 1.0), FoundFile(b"older", 0.5), FoundFile(b"newer", 2.0)]) == [b"older"]
    assert shelf.add(b"x") == b"old"
    assert shelf.add(b"y") == b"newer"
    assert shelf.add(b"z") == b"new"


def test_files_of_a_later_report_go_before_those_of_an_earlier_one() -> None:
    shelf = DiskShelf(3)
    assert shelf.found([FoundFile(b"newest", 9.0), FoundFile(b"newer", 8.0)]) == []
    assert shelf.found([FoundFile(b"old", 7.0), FoundFile(b"older", 6.0)]) == [b"older"]
    assert [shelf.add(name) for name in (b"x", b"y", b"z")] == [b"old", b"newer", b"newest"]


def test_files_of_a_model_with_larger_blocks_take_their_room_until_they_go() -> None:
    """However the files of two models follow each other, they take no more bytes than the quota."""
    shelf = DiskShelf(100)
    large = [FoundFile(b"large %d" % number, float(number), 10) for number in range(12)]
    assert shelf.found(large) == [b"large 0", b"large 1"]
    assert shelf.num_used == 100
    evicted = []
    for number in range(25):
        evicted.append(shelf.add(b"small %d" % number))
        shelf.check()
    assert [name for name in evicted if name] == [b"large 2", b"large 3", b"large 4"]
    shelf.forget(b"large 5")
    shelf.forget(b"nothing")
    assert shelf.num_used == 85
    assert len(shelf.clear()) == 31
    assert shelf.num_used == 0
    shelf.check()


def test_a_file_that_is_known_is_not_found_again() -> None:
    shelf = DiskShelf(2)
    shelf.add(b"a")
    assert shelf.found([FoundFile(b"a", 1.0)]) == []
    assert len(shelf) == 1


def test_a_full_disk_holds_no_more_than_it_does_for_a_while_but_never_nothing() -> None:
    shelf = DiskShelf(10)
    shelf.add(b"a")
    shelf.add(b"b")
    shelf.shrink()
    assert shelf.add(b"c") == b"a"
    shelf.clear()
    shelf.shrink()
    assert [shelf.add(name) for name in (b"d", b"e")] == [None, b"d"]
    assert shelf.quota == 10


def test_a_disk_that_takes_files_again_is_filled_up_to_its_quota() -> None:
    shelf = DiskShelf(20)
    shelf.add(b"a")
    shelf.shrink()
    sizes = []
    for number in range(400):
        shelf.add(bytes([number // 256, number % 256]))
        shelf.written()
        shelf.check()
        sizes.append(len(shelf))
    assert sizes[:8] == [1] * 8
    assert sizes == sorted(sizes)
    assert sizes[-1] == 20


def test_a_disk_that_stays_full_is_tried_now_and_then() -> None:
    shelf, room, failures = DiskShelf(1_000), 30, 0
    for number in range(600):
        shelf.add(bytes([number // 256, number % 256]))
        if len(shelf) > room:
            failures += 1
            shelf.forget(bytes([number // 256, number % 256]))
            shelf.shrink()
        else:
            shelf.written()
    assert 0 < failures < 80
