"""Files that clients uploaded and that batches wrote, in a folder that all edges of the server share."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.serving.http.errors import ApiError

_FILE_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `owner` is the digest of the API key that it belongs to; nobody else finds it."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
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
    """Keeps files in a folder: `ID.json` describes a file, `ID.data` holds it. Bounded in number and bytes.

    Methods read and write the disk, so call them in a thread.
    """

    def __init__(self, directory: Path, limits: Mapping[str, int]) -> None:
        self._directory, self._limits = directory, limits

    def add(self, owner: str, filename: str, purpose: str, data: bytes) -> StoredFile:
        """Keep an uploaded file. Raises ApiError (400, 413) over a limit."""
        self._check_room(len(data))
        file = self.begin(owner, filename, purpose)
        self.data_path(file).write_bytes(data)
        return self.finish(file)

    def begin(self, owner: str, filename: str, purpose: str) -> StoredFile:
        """Describe a file that is still to be written to `data_path`. Nobody finds it before `finish`."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return StoredFile(f"file-{secrets.token_hex(12)}", owner, filename, purpose, epoch_seconds())

    def finish(self, file: StoredFile) -> StoredFile:
        """Make a file that was written known."""
        size = self.data_path(file).stat().st_size
        known = StoredFile(file.id, file.owner, file.filename, file.purpose, file.created_at, size)
        write_json(self._directory / f"{file.id}.json", asdict(known))
        return known

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises ApiError (404) for a file that is not there or not the owner's."""
        found = self._read(self._directory / f"{file_id}.json") if _FILE_ID.fullmatch(file_id) else None
        if found is None or found.owner != owner:
            raise ApiError(404, f"file_id: no file of yours is called {file_id[:80]!a}", code="file_not_found")
        return found

    def owned_by(self, owner: str) -> list[StoredFile]:
        """All files of an owner, the newest first."""
        found = [self._read(path) for path in self._directory.glob("file-*.json")]
        own = [file for file in found if file is not None and file.owner == owner]
        return sorted(own, key=lambda file: (-file.created_at, file.id))

    def content(self, file: StoredFile) -> bytes:
        return self.data_path(file).read_bytes()

    def delete(self, file: StoredFile) -> None:
        (self._directory / f"{file.id}.json").unlink(missing_ok=True)
        self.data_path(file).unlink(missing_ok=True)

    def data_path(self, file: StoredFile) -> Path:
        return self._directory / f"{file.id}.data"

    def num_bytes(self) -> int:
        """Bytes of all files, those that are still written too."""
        return sum(size for _, size in self._sizes())

    def _check_room(self, num_bytes: int) -> None:
        limits = self._limits
        if num_bytes > limits["file_bytes"]:
            message = f"file: has {num_bytes} bytes, limit {limits['file_bytes']}; split it"
            raise ApiError(413, message, code="file_too_large", param="file")
        sizes = self._sizes()
        if len(sizes) >= limits["files"] or sum(size for _, size in sizes) + num_bytes > limits["files_bytes"]:
            bounds = f"{limits['files']} files, {limits['files_bytes']} bytes"
            message = f"file: the server keeps no more than {bounds}; delete some first (DELETE /v1/files/ID)"
            raise ApiError(400, message, code="too_many_files", param="file")

    def _sizes(self) -> list[tuple[str, int]]:
        if not self._directory.exists():
            return []
        with os.scandir(self._directory) as entries:
            return [(entry.name, entry.stat().st_size) for entry in entries if entry.name.endswith(".data")]

    @staticmethod
    def _read(path: Path) -> StoredFile | None:
        try:
            return StoredFile(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def remove_all(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def epoch_seconds() -> int:
    return int(datetime.now(UTC).timestamp())


def write_json(path: Path, value: object) -> None:
    """Write a file so that readers find the old or the new one, never half of it."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)
