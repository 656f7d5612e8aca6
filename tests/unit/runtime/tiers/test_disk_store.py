"""Blocks as files: complete or deleted, in order, and no failure raises."""

from __future__ import annotations

import os
import random
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from disk_bench import NUM_SLOTS, PATIENCE, SLOT_BYTES, Disk, at_once, key
from faulty_folder import BROKEN, FULL, QUOTA
from quire.runtime.tiers.block_file import HEADER_BYTES
from quire.runtime.tiers.disk_store import DiskReport
from quire.runtime.tiers.folder import PrivateFolder
from quire.types.errors import ConfigError
from quire.types.transfer import FailedFile


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "cache")
    yield made
    made.folder.errors.clear()
    made.folder.gate.set()
    made.store.close()


def test_what_was_stored_is_fetched(disk: Disk) -> None:
    assert disk.put(1).stored == (key(1),)
    assert disk.get(1).fetched == (key(1),)
    assert disk.holds(1, 1)


def test_folder_and_files_are_private_to_this_user(disk: Disk) -> None:
    disk.put(1)
    assert stat.S_IMODE(disk.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(disk.file(1).stat().st_mode) == 0o600
    assert disk.names == {key(1).hex()}


def test_a_file_holds_a_header_and_the_unchanged_bytes(disk: Disk) -> None:
    disk.put(1)
    data = disk.file(1).read_bytes()
    assert len(data) == HEADER_BYTES + SLOT_BYTES
    assert data[HEADER_BYTES:] == disk.slots[0].tobytes()
    assert key(1) in data[:HEADER_BYTES]


def test_a_symbolic_link_is_never_followed(disk: Disk) -> None:
    disk.put(1)
    disk.file(1).rename(disk.path / "moved")
    disk.file(1).symlink_to(disk.path / "moved")
    assert [failed.reason for failed in disk.get(1).failed] == ["io"]
    assert disk.names == {"moved"}


@pytest.mark.parametrize("number", [FULL, QUOTA])
@pytest.mark.parametrize("operation", ["create", "write", "rename"])
def test_a_full_disk_is_reported_and_leaves_nothing_behind(disk: Disk, operation: str, number: int) -> None:
    disk.folder.errors[operation] = number
    assert disk.put(1).failed == (FailedFile(key(1), "full"),)
    assert disk.names == set()
    disk.folder.errors.clear()
    assert disk.put(1).stored == (key(1),)


@pytest.mark.parametrize("operation", ["create", "write", "rename"])
def test_a_disk_that_cannot_be_written_is_reported(disk: Disk, operation: str) -> None:
    disk.folder.errors[operation] = BROKEN
    assert disk.put(1).failed == (FailedFile(key(1), "io"),)


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_file_that_cannot_be_read_is_reported_and_deleted(disk: Disk, operation: str) -> None:
    disk.put(1)
    disk.folder.errors[operation] = BROKEN
    assert disk.get(1).failed == (FailedFile(key(1), "io"),)
    assert disk.names == set()


def test_a_missing_file_is_reported(disk: Disk) -> None:
    disk.put(1)
    disk.file(1).unlink()
    assert disk.get(1).failed == (FailedFile(key(1), "missing"),)


def test_a_deleted_folder_fails_every_job_and_nothing_else(disk: Disk) -> None:
    disk.put(1)
    disk.file(1).unlink()
    disk.path.rmdir()
    assert [failed.reason for failed in disk.get(1).failed] == ["missing"]
    assert [failed.reason for failed in disk.put(2).failed] == ["missing"]


def damage(data: bytearray, kind: str) -> bytes:
    if kind == "shorter":
        return bytes(data[:-1])
    if kind == "empty":
        return b""
    if kind == "longer":
        return bytes(data) + b"!"
    data[{"magic": 0, "version": 8, "key": 12, "length": 44, "checksum": 60, "first byte": HEADER_BYTES}[kind]] ^= 1
    return bytes(data)


KINDS = ["shorter", "empty", "longer", "magic", "version", "key", "length", "checksum", "first byte"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_reported_and_deleted(disk: Disk, kind: str) -> None:
    disk.put(1)
    disk.file(1).write_bytes(damage(bytearray(disk.file(1).read_bytes()), kind))
    assert disk.get(1).failed == (FailedFile(key(1), "corrupt"),)
    assert disk.names == set()


def test_any_flipped_bit_is_noticed(disk: Disk) -> None:
    rng = random.Random(5)
    for _ in range(40):
        disk.put(1)
        data = bytearray(disk.file(1).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        disk.file(1).write_bytes(bytes(data))
        assert [failed.reason for failed in disk.get(1).failed] == ["corrupt"]


def test_another_blocks_file_under_a_name_is_noticed(disk: Disk) -> None:
    disk.put(1)
    disk.put(2)
    disk.file(2).replace(disk.file(1))
    assert [failed.reason for failed in disk.get(1).failed] == ["corrupt"]


def test_dropped_files_are_deleted_and_dropping_a_missing_file_is_no_failure(disk: Disk) -> None:
    disk.put(1)
    disk.store.drop(key(1))
    disk.store.drop(key(2))
    assert disk.put(3).failed == ()
    assert [failed.reason for failed in disk.get(1).failed] == ["missing"]


def test_a_file_that_cannot_be_deleted_is_logged_and_fails_no_later_job(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.put(1)
    disk.folder.errors["unlink"] = BROKEN
    disk.store.drop(key(1))
    assert disk.put(1).failed == ()
    assert "(io)" in caplog.text


def test_a_store_waits_until_its_slot_is_ready(disk: Disk) -> None:
    arrived = Event()
    disk.store.store(key(1), 0, lambda: (arrived.wait(), None)[1])
    disk.fill(0, 1)
    arrived.set()
    disk.wait(lambda report: report.stored)
    disk.get(1)
    assert disk.holds(1, 1)


def test_jobs_on_one_key_or_slot_run_in_order(disk: Disk) -> None:
    disk.folder.gate.clear()
    disk.put(1, slot=0)
    disk.store.fetch(key(1), 1, at_once)  # hangs until the gate opens
    disk.store.drop(key(1))
    disk.store.store(key(2), 1, at_once)  # what the fetch left in slot 1
    disk.folder.gate.set()
    report = disk.wait(lambda report: report.stored)
    assert (report.fetched, report.stored, report.failed) == ((key(1),), (key(2),), ())
    assert disk.names == {key(2).hex()}
    assert disk.file(2).read_bytes()[HEADER_BYTES:] == disk.slots[0].tobytes()


def test_a_hanging_disk_does_not_delay_closing(disk: Disk) -> None:
    disk.put(1)
    disk.folder.gate.clear()
    disk.store.fetch(key(1), 1, at_once)
    disk.store.store(key(2), 1, at_once)  # waits for the fetch
    disk.store.close(seconds=0.05)
    assert disk.store.take_report() == DiskReport()
    disk.folder.gate.set()
    for thread in disk.store._threads:
        thread.join()
    assert disk.store.take_report().stored == ()  # what was abandoned is not said to be there
    assert key(2).hex() not in disk.names


def test_a_flush_waits_for_all_jobs_and_returns_whether_they_are_done(disk: Disk) -> None:
    disk.put(1)
    disk.folder.gate.clear()
    disk.store.fetch(key(1), 1, at_once)
    disk.store.store(key(2), 0, at_once)
    assert not disk.store.flush(seconds=0.0)
    disk.folder.gate.set()
    assert disk.store.flush(PATIENCE)
    report = disk.store.take_report()
    assert (report.fetched, report.stored) == ((key(1),), (key(2),))
    assert disk.store.flush(seconds=0.0)


def test_closing_finishes_submitted_jobs(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "cache")
    for number in range(NUM_SLOTS):
        disk.fill(number, number)
        disk.store.store(key(number), number, at_once)
    disk.store.close(seconds=PATIENCE)
    assert disk.names == {key(number).hex() for number in range(NUM_SLOTS)}


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    ours, theirs = Disk(tmp_path / "cache"), Disk(tmp_path / "cache")
    ours.put(1)
    assert theirs.get(1).fetched == (key(1),)
    assert theirs.holds(1, 1)
    ours.put(2)
    theirs.put(2)  # the same content, written again
    theirs.store.drop(key(1))
    assert theirs.store.flush(PATIENCE)
    assert [failed.reason for failed in ours.get(1).failed] == ["missing"]
    assert ours.get(2).fetched == (key(2),)
    for each in (ours, theirs):
        each.store.close()


def test_random_jobs_leave_the_same_files_as_a_dictionary(disk: Disk) -> None:
    rng, files, slots = random.Random(11), {}, dict.fromkeys(range(NUM_SLOTS), -1)
    disk.slots[:] = 0
    for _ in range(300):
        number, slot = rng.randrange(5), rng.randrange(NUM_SLOTS)
        kind = rng.choice(["store", "fetch", "drop"])
        if kind == "store":
            disk.fill(slot, number)
            slots[slot] = files[number] = number
            disk.store.store(key(number), slot, at_once)
            disk.wait(lambda report: report.stored)
        elif kind == "drop":
            files.pop(number, None)
            disk.store.drop(key(number))
        else:
            disk.store.fetch(key(number), slot, at_once)
            report = disk.wait(lambda report: report.fetched or report.failed)
            assert bool(report.fetched) == (number in files)
            slots[slot] = files.get(number, slots[slot])
        assert all(value == -1 or disk.holds(slot, value) for slot, value in slots.items())


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"disk_cache_path: other users may access .* \(mode 755\)"):
        PrivateFolder(str(tmp_path))


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_the_error_for_a_shared_folder_names_a_private_subfolder_that_works(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        PrivateFolder(str(tmp_path))
    assert "chmod" not in str(caught.value)
    named = re.search(r"such as '([^']+)'", str(caught.value))
    assert named is not None
    PrivateFolder(named[1]).close()
    assert stat.S_IMODE(Path(named[1]).stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="disk_cache_path: .* belongs to another user"):
        PrivateFolder(str(tmp_path))


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_cache_path: .* cannot be used"):
        PrivateFolder(str(tmp_path / "file"))


def test_a_key_of_another_length_is_an_error_of_the_engine(disk: Disk) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        disk.store.drop(b"short")
