"""A full disk and a process without file handles: nothing is left half written, no stored file is called missing."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.serving.batch_lines import ResultFile
from quire.serving.http.batches import runner as runner_module
from quire.serving.http.batches.batch_store import BatchStore
from quire.serving.http.batches.file_store import FileStore, write_json
from quire.serving.http.batches.runner import BatchRunner
from quire.serving.http.errors import ApiError, unexpected_error
from quire.serving.http.limits import Limits

ROOM = 1 << 20  # bytes that a file may have; Python ignores the signal of a larger one


@contextmanager
def little_room() -> Iterator[None]:
    """A write beyond ROOM writes what fits, and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_file_handles() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_result_that_does_not_fit_is_left_out_whole(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    with ResultFile(path) as file:
        file.append(b'{"a": 1}\n')
        with little_room(), pytest.raises(OSError, match="large"):
            file.append(b"x" * (ROOM + 1) + b"\n")
        assert path.read_bytes() == b'{"a": 1}\n'
        file.append(b'{"b": 2}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_an_upload_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, Limits())
    with little_room(), pytest.raises(OSError, match="large"):
        store.add("me", "input.jsonl", "batch", b"x" * (ROOM + 1))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert store.owned_by("me") == []


def test_a_description_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    write_json(path, {"status": "in_progress"})
    with little_room(), pytest.raises(OSError, match="large"):
        write_json(path, {"status": "x" * (ROOM + 1)})
    assert json.loads(path.read_bytes()) == {"status": "in_progress"}
    assert list(tmp_path.iterdir()) == [path]


def test_without_file_handles_no_stored_file_or_batch_is_called_missing(tmp_path: Path) -> None:
    limits = Limits()
    files, batches = FileStore(tmp_path, limits), BatchStore(tmp_path, limits)
    file, batch = files.add("me", "a", "batch", b"x"), batches.create("me", "/v1/completions", "file", None)
    with no_file_handles():
        for look in (lambda: files.get("me", file.id), lambda: batches.get("me", batch.id)):
            with pytest.raises(OSError, match="open files"):
                look()
    assert files.get("me", file.id) == file
    assert batches.get("me", batch.id) == batch


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (errno.ENOSPC, 507, "disk_full"),
        (errno.EDQUOT, 507, "disk_full"),
        (errno.EMFILE, 503, "too_many_open_files"),
        (errno.EIO, 500, "internal_error"),
    ],
)
def test_a_client_reads_what_is_wrong_with_the_disk(number: int, status: int, code: str) -> None:
    found = unexpected_error(OSError(number, "said by the system", "/secret/path"))
    assert (found.status, found.code) == (status, code)
    assert b"secret" not in found.body()
    assert isinstance(found, ApiError)


def test_a_batch_whose_end_cannot_be_stored_ends_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.01)
    runner = BatchRunner(tmp_path, Limits(), dispatcher=None)  # type: ignore[arg-type]
    batch = runner.batches.create("me", "/v1/unknown", "file", None)
    save, lock, fails = runner.batches.save, runner.batches.lock, [3, 2]

    def full(*given: object) -> None:
        if fails[0]:
            fails[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        save(batch)

    def no_handles(*given: object) -> int | None:
        if fails[1]:
            fails[1] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return lock(batch)

    monkeypatch.setattr(runner.batches, "save", full)
    monkeypatch.setattr(runner.batches, "lock", no_handles)
    asyncio.run(asyncio.wait_for(runner._run(batch), 20.0))
    stored = runner.batches.get("me", batch.id)
    assert stored.status == "failed"
    assert stored.problem == "endpoint /v1/unknown is not served"
    assert fails == [0, 0]


def test_a_batch_that_may_not_be_locked_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = BatchRunner(tmp_path, Limits(), dispatcher=None)  # type: ignore[arg-type]
    batch = runner.batches.create("me", "/v1/unknown", "file", None)

    def refused(*given: object) -> int | None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/path")

    monkeypatch.setattr(runner.batches, "lock", refused)
    asyncio.run(asyncio.wait_for(runner._run(batch), 5.0))
    stored = runner.batches.get("me", batch.id)
    assert stored.status == "failed"
    assert stored.problem == "the server could not read or write its files: Permission denied"


def test_a_batch_in_a_folder_that_may_not_be_written_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = BatchRunner(tmp_path, Limits(), dispatcher=None)  # type: ignore[arg-type]
    batch = runner.batches.create("me", "/v1/unknown", "file", None)

    def refused(*given: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(runner.batches, "lock", refused)
    monkeypatch.setattr(runner.batches, "save", refused)
    asyncio.run(asyncio.wait_for(runner._run(batch), 5.0))
    assert runner.batches.get("me", batch.id).status == "validating"
    assert f"batch {batch.id}: it cannot be stored that it failed: [Errno {errno.EROFS}]" in caplog.text
