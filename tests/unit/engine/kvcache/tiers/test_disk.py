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


def test_a_file_that_is_known_is_not_found_again() -> None:
    shelf = DiskShelf(2)
    shelf.add(b"a")
    assert shelf.found([FoundFile(b"a", 1.0)]) == []
    assert len(shelf) == 1


def test_a_full_disk_lowers_the_quota_to_what_it_holds_but_not_to_nothing() -> None:
    shelf = DiskShelf(10)
    shelf.add(b"a")
    shelf.add(b"b")
    shelf.shrink()
    assert shelf.quota == 2
    shelf.clear()
    shelf.shrink()
    assert shelf.quota == 1
