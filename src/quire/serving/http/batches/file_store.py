"""Files that clients uploaded or batches wrote, in a folder that all edges of the server share."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.serving.http.errors import ApiError

_FILE_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `owner` is the digest of the API key that it belongs to; requests with other keys do not find it."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the file in the shape of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Keeps files in a folder: `ID.json` describes a file and `ID.data` holds its bytes. While a batch writes a file,
    `ID.part` describes it instead, so clients do not find it. The number and total bytes of files per owner are
    bounded.

    Methods read and write the disk, so call them in a thread.
    """

    def __init__(self, directory: Path, limits: Mapping[str, int]) -> None:
        self._directory, self._limits = directory, limits
        self._owners: dict[str, str] = {}  # by file id, so that a description is read only once

    @property
    def bounds(self) -> str:
        """The limits on the files of one owner, as text for error messages."""
        return f"an API key may store {self._limits['files']} files with {self._limits['files_bytes']} bytes in total"

    def add(self, owner: str, filename: str, purpose: str, data: bytes) -> StoredFile:
        """Store an uploaded file. Raises ApiError (400, 413) above a limit."""
        if len(data) > self._limits["file_bytes"]:
            message = f"file: has {len(data)} bytes, limit {self._limits['file_bytes']}; split it"
            raise ApiError(413, message, code="file_too_large", param="file")
        with self._locked():
            self.check_room(owner, 1, len(data), "file")
            file = self._describe(owner, filename, purpose)
            try:
                self.data_path(file).write_bytes(data)
                return self.finish(file)
            except OSError:  # such as a full disk
                self.delete(file)
                raise

    def begin(self, owner: str, filenames: Iterable[str], purpose: str) -> list[StoredFile]:
        """Create files that a batch will write to their `data_path`. Clients do not find them before `finish`. Raises
        ApiError (400) above a limit."""
        files = [self._describe(owner, name, purpose) for name in filenames]
        with self._locked():
            self.check_room(owner, len(files))
            for file in files:
                write_json(self._directory / f"{file.id}.part", asdict(file))
        return files

    def finish(self, file: StoredFile) -> StoredFile:
        """Make a completely written file visible to its owner. Returns it with its size."""
        size = self.data_path(file).stat().st_size
        known = StoredFile(file.id, file.owner, file.filename, file.purpose, file.created_at, size)
        write_json(self._directory / f"{file.id}.json", asdict(known))
        (self._directory / f"{file.id}.part").unlink(missing_ok=True)
        return known

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Return a file. Raises ApiError (404) if it does not exist or belongs to another owner."""
        found = self._read(self._directory / f"{file_id}.json") if _FILE_ID.fullmatch(file_id) else None
        if found is None or found.owner != owner:
            raise _not_found(file_id)
        return found

    def owned_by(self, owner: str) -> list[StoredFile]:
        """Return all finished files of an owner, the newest first."""
        found = [self._read(path) for path in self._directory.glob("file-*.json")]
        own = [file for file in found if file is not None and file.owner == owner]
        return sorted(own, key=lambda file: (-file.created_at, file.id))

    def pieces(self, file: StoredFile, num_bytes: int) -> Iterator[bytes]:
        """Yield the content of a file in pieces of at most `num_bytes`. Raises ApiError (404) if it was deleted
        meanwhile."""
        try:
            data = self.data_path(file).open("rb")
        except FileNotFoundError:
            raise _not_found(file.id) from None
        with data:
            while piece := data.read(num_bytes):
                yield piece

    def delete(self, file: StoredFile) -> None:
        for suffix in ("json", "part", "data"):
            (self._directory / f"{file.id}.{suffix}").unlink(missing_ok=True)

    def data_path(self, file: StoredFile) -> Path:
        return self._directory / f"{file.id}.data"

    def check_room(self, owner: str, num_files: int, num_bytes: int = 0, param: str | None = None) -> None:
        """Raise ApiError (400) if the owner may not store this many more files and bytes."""
        sizes = self._sizes(owner)
        if len(sizes) + num_files > self._limits["files"] or sum(sizes) + num_bytes > self._limits["files_bytes"]:
            message = f"file: {self.bounds}; delete some first (DELETE /v1/files/ID)"
            raise ApiError(400, message, code="too_many_files", param=param)

    def room(self, owner: str) -> int:
        """Return how many more bytes the owner may store; negative above the limit."""
        return self._limits["files_bytes"] - sum(self._sizes(owner))

    def _sizes(self, owner: str) -> list[int]:
        """Return the sizes in bytes of an owner's files, including those that are still being written."""
        paths = {path.stem: path for ending in ("part", "json") for path in self._directory.glob(f"file-*.{ending}")}
        before = self._owners
        new = {file_id: self._read(path) for file_id, path in paths.items() if file_id not in before}
        known = before | {file_id: file.owner for file_id, file in new.items() if file is not None}
        self._owners = {file_id: known[file_id] for file_id in paths if file_id in known}
        return [self._size(file_id) for file_id in paths if known.get(file_id) == owner]

    def _size(self, file_id: str) -> int:
        try:
            return (self._directory / f"{file_id}.data").stat().st_size
        except FileNotFoundError:
            return 0

    @staticmethod
    def _describe(owner: str, filename: str, purpose: str) -> StoredFile:
        return StoredFile(f"file-{secrets.token_hex(12)}", owner, filename, purpose, epoch_seconds())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock while the block runs, so that no other edge or thread checks for room and adds files
        meanwhile."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @staticmethod
    def _read(path: Path) -> StoredFile | None:
        try:
            return StoredFile(**json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def _not_found(file_id: str) -> ApiError:
    return ApiError(404, f"file_id: no file of yours has the id {file_id[:80]!a}", code="file_not_found")


def epoch_seconds() -> int:
    return int(datetime.now(UTC).timestamp())


def write_json(path: Path, value: object) -> None:
    """Replace a file atomically, so that readers see either the old or the new content. Raises OSError, and leaves the
    old content."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(json.dumps(value), encoding="utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
