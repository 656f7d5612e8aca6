"""A block that is being written has a part file. A clean-up deletes the part files that nobody writes any more.

The first tests put a clean-up between two system calls of a writer, by taking the place of `flock`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from disk_bench import PATIENCE, Disk, key
from quire.runtime.tiers.folder import ABANDONED_SECONDS
from quire.types.transfer import FailedFile

Lock = Callable[[object, int], None]


def clean_up(path: Path) -> None:
    """What a process does that starts over the same folder."""
    Disk(path).store.close()


def left_behind(path: Path, age: float) -> Path:
    """A part file of a process that died so many seconds ago."""
    path.mkdir(0o700, exist_ok=True)
    file = path / f"{key(7).hex()}.4711-3.part"
    file.write_text("half a block")
    os.utime(file, (time.time() - age,) * 2)
    return file


def take_the_place_of_flock(monkeypatch: pytest.MonkeyPatch, calls: list[Callable[[Lock, object, int], None]]) -> None:
    """The first calls of `flock`, by any thread, are these; later ones lock as ever."""
    flock = fcntl.flock
    left = list(calls)

    def call(file: object, operation: int) -> None:
        if left:
            left.pop(0)(flock, file, operation)
        else:
            flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", call)


def test_a_clean_up_that_meets_a_new_file_before_it_is_locked_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "cache")

    def late(flock: Lock, file: object, operation: int) -> None:
        clean_up(disk.path)
        assert disk.names == set()  # so the new file was met
        flock(file, operation)

    take_the_place_of_flock(monkeypatch, [late])
    assert disk.put(1).stored == (key(1),)
    assert disk.get(1).fetched == (key(1),)
    disk.store.close()
    assert disk.names == {key(1).hex()}


def test_a_clean_up_that_has_locked_a_new_file_and_not_deleted_it_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, locked, refused = Disk(tmp_path / "cache"), Event(), Event()
    others: list[Disk] = []

    def writer(flock: Lock, file: object, operation: int) -> None:
        others.append(Disk(disk.path, lists=False))
        others[0].folder.listing.set()
        assert locked.wait(PATIENCE)
        try:
            flock(file, operation)
        finally:
            refused.set()
            others[0].store._scanner.join()

    def cleaner(flock: Lock, file: object, operation: int) -> None:
        flock(file, operation)
        locked.set()
        assert refused.wait(PATIENCE)

    take_the_place_of_flock(monkeypatch, [writer, cleaner])
    assert disk.put(1).stored == (key(1),)
    assert disk.get(1).fetched == (key(1),)
    for each in (disk, others[0]):
        each.store.close()
    assert disk.names == {key(1).hex()}


def test_a_writer_whose_new_files_are_all_locked_reports_the_block_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked by another")

    disk = Disk(tmp_path / "cache")
    with monkeypatch.context() as always:
        always.setattr(fcntl, "flock", taken)
        assert disk.put(1).failed == (FailedFile(key(1), "io"),)
    assert disk.names == set()
    assert disk.put(1).stored == (key(1),)
    disk.store.close()


def test_two_writers_of_one_block_do_not_share_a_part_file(tmp_path: Path) -> None:
    ours, theirs = Disk(tmp_path / "cache"), Disk(tmp_path / "cache")
    reports = []

    def meanwhile(slot: int) -> memoryview:
        if not reports:  # ours has begun to write
            reports.append(theirs.put(1))
        return memoryview(ours.slots[slot])

    ours.store._bytes_of = meanwhile
    assert ours.put(1).stored == (key(1),)
    assert reports[0].stored == (key(1),)
    for each in (ours, theirs):
        assert each.get(1).fetched == (key(1),)
        each.store.close()
    assert ours.names == {key(1).hex()}


WRITER = """
import sys
from quire.runtime.tiers.folder import PrivateFolder
part, file = PrivateFolder(sys.argv[1]).create(sys.argv[2])
file.write(b"half a block")
print(part, flush=True)
sys.stdin.read()
"""


def test_what_another_process_writes_stays_until_that_process_has_died(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WRITER, str(path), key(1).hex()]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        part = process.stdout.readline().strip()
        clean_up(path)
        assert {file.name for file in path.iterdir()} == {part}
        process.kill()
        process.wait()
    clean_up(path)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_file_locks_blocks_are_written_and_old_part_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    file = left_behind(tmp_path / "cache", age=ABANDONED_SECONDS / 2)
    disk = Disk(tmp_path / "cache")
    assert disk.put(1).stored == (key(1),)
    assert disk.names == {key(1).hex(), file.name}
    left_behind(tmp_path / "cache", age=ABANDONED_SECONDS * 2)
    clean_up(disk.path)
    assert disk.names == {key(1).hex()}
    disk.store.close()
