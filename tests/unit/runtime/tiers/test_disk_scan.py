"""What a disk store finds in its folder at the start."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from disk_bench import PATIENCE, SLOT_BYTES, Disk, at_once, key
from faulty_folder import BROKEN, FaultyFolder
from quire.runtime.tiers import disk_store
from quire.runtime.tiers.block_file import HEADER_BYTES
from quire.runtime.tiers.disk_store import DiskStore
from quire.runtime.tiers.folder import PrivateFolder
from quire.types.transfer import FoundFile


def test_what_an_earlier_process_left_is_found_and_read(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    tmp_path.chmod(0o700)
    for number in (1, 2):
        first.put(number)
    first.store.close()
    os.utime(first.file(1), (50.0, 50.0))
    second = Disk(tmp_path)
    found = second.wait(lambda report: len(report.found) == 2).found
    assert found == (FoundFile(key(2), second.file(2).stat().st_mtime), FoundFile(key(1), 50.0))
    assert second.get(2).fetched == (key(2),)
    assert second.holds(1, 2)
    second.get(1)
    assert second.file(1).stat().st_mtime > 50.0  # it counts as used
    second.store.close()


def left(path: Path, ages: dict[int, float], num_bytes: int = HEADER_BYTES + SLOT_BYTES) -> None:
    """Files of an earlier process, by number, and when each was used."""
    path.mkdir(0o700, exist_ok=True)
    for number, used_at in ages.items():
        file = path / key(number).hex()
        file.write_bytes(bytes(num_bytes))
        os.utime(file, (used_at, used_at))


def test_a_store_waits_for_its_folder_so_that_the_first_report_names_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "_SCAN_SECONDS", PATIENCE)
    left(tmp_path / "cache", {1: 50.0})
    folder = FaultyFolder(PrivateFolder(str(tmp_path / "cache")))
    folder.listing.clear()
    Timer(0.05, folder.listing.set).start()
    store = DiskStore(folder, lambda _: memoryview(bytearray(SLOT_BYTES)))
    assert store.take_report().found == (FoundFile(key(1), 50.0),)
    store.close()


def test_files_are_found_newest_first_however_many_reports_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "MAX_FOUND", 3)
    ages = {number: float(37 * number % 101) for number in range(20)}
    left(tmp_path / "cache", ages)
    disk = Disk(tmp_path / "cache")
    assert len(disk.store.take_report().found) == 3
    found = disk.wait(lambda report: len(report.found) == 17).found
    assert [file.used_at for file in found] == sorted(ages.values(), reverse=True)[3:]
    disk.store.close()


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks"), [(0, 1), (10, 1), (HEADER_BYTES + SLOT_BYTES + 1, 2), (9_999, 10)]
)
def test_another_models_file_counts_as_the_blocks_whose_room_it_takes(
    tmp_path: Path, num_bytes: int, num_blocks: int
) -> None:
    left(tmp_path / "cache", {1: 7.0}, num_bytes)
    disk = Disk(tmp_path / "cache")
    assert disk.wait(lambda report: report.found).found == (FoundFile(key(1), 7.0, num_blocks),)
    disk.store.close()


def test_files_that_go_while_the_folder_is_read_are_left_out_and_the_others_found(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    left(path, dict.fromkeys(range(60), 1.0))
    folder = PrivateFolder(str(path))
    entries = folder.entries()
    first = next(entries).name
    for file in sorted(file for file in path.iterdir() if file.name != first)[::3]:
        file.unlink()
    assert {first, *(entry.name for entry in entries)} == {file.name for file in path.iterdir()}
    folder.close()


@pytest.mark.parametrize("lists", [True, False])
def test_what_was_found_and_not_reported_can_be_deleted_before_it_is_written_again(tmp_path: Path, lists: bool) -> None:
    left(tmp_path / "cache", dict.fromkeys(range(20), 1.0))
    disk = Disk(tmp_path / "cache", lists=lists)
    disk.store.drop_found()
    disk.folder.listing.set()
    disk.store._scanner.join()
    assert disk.put(3).stored == (key(3),)
    assert disk.store.take_report().found == ()
    disk.store.close()
    assert disk.names == {key(3).hex()}


def test_what_is_written_after_the_found_are_dropped_stays_though_the_folder_is_still_read(tmp_path: Path) -> None:
    left(tmp_path / "cache", dict.fromkeys(range(20), 1.0))
    disk = Disk(tmp_path / "cache", lists=False)
    disk.store.drop_found()
    assert disk.put(3).stored == (key(3),)
    disk.folder.listing.set()
    disk.store._scanner.join()
    assert disk.names == {key(3).hex()}
    assert disk.get(3).fetched == (key(3),)
    disk.store.close()


def test_closing_waits_for_files_to_be_deleted_that_are_not_found_yet(tmp_path: Path) -> None:
    left(tmp_path / "cache", dict.fromkeys(range(20), 1.0))
    disk = Disk(tmp_path / "cache", lists=False)
    disk.store.drop_found()
    Timer(0.05, disk.folder.listing.set).start()
    disk.store.close(seconds=PATIENCE)
    assert disk.names == set()


def test_leftovers_of_writing_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    part, target = f"{key(1).hex()}.123-4.part", tmp_path.parent / "elsewhere"
    target.write_text("precious")
    (tmp_path / part).write_text("half a block")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / key(2).hex()).symlink_to(target)
    (tmp_path / key(3).hex()).mkdir()
    in_use = PrivateFolder(str(tmp_path))
    other, file = in_use.create(key(4).hex())
    with file:
        disk = Disk(tmp_path)
        disk.put(5)
        disk.store.close()
        assert disk.store.take_report().found == ()
        assert disk.names == {"notes.txt", key(2).hex(), key(3).hex(), key(5).hex(), other}
    assert target.read_text() == "precious"
    in_use.close()


def test_a_folder_that_cannot_be_listed_is_used_all_the_same(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = FaultyFolder(PrivateFolder(str(tmp_path)), {"entries": BROKEN})
    slots = np.zeros((1, SLOT_BYTES), dtype=np.uint8)
    store = DiskStore(folder, lambda slot: memoryview(slots[slot]))
    store.store(key(1), 0, at_once)
    store.close()
    assert store.take_report().stored == (key(1),)
