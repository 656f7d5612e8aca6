"""The descriptions of batches, in a folder that all edges of the server share."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.serving.http.batches.file_store import epoch_seconds, write_json
from quire.serving.http.errors import ApiError

WINDOW_SECONDS = 24 * 3_600
ENDED = ("completed", "failed", "expired", "cancelled")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(slots=True, kw_only=True)
class Batch:
    """One batch. `owner` is the digest of the API key that created it; requests with other keys do not find it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)  # when it entered each state, in seconds since the epoch
    output_file_id: str | None = None
    error_file_id: str | None = None
    reserved: list[str] = field(default_factory=list)  # ids of the output and error files, once created
    total: int = 0
    completed: int = 0
    failed: int = 0
    problem: str | None = None  # why it failed; None unless it has

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_SECONDS

    def enter(self, status: str) -> None:
        """Set the status, and record the time of its first use."""
        self.status = status
        self.times.setdefault(status, epoch_seconds())

    def as_json(self) -> dict[str, Any]:
        """Return the batch in the shape of OpenAI's API."""
        errors = None
        if self.problem is not None:
            entry = {"code": "batch_failed", "line": None, "message": self.problem, "param": None}
            errors = {"object": "list", "data": [entry]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchStore:
    """Keeps batches in a folder: `ID.json` describes a batch; the edge that runs it locks `ID.lock`; `ID.cancel` asks
    that edge to stop. The number of batches per owner is bounded: the oldest ended ones are forgotten.

    Methods read and write the disk, so call them in a thread.
    """

    def __init__(self, directory: Path, limits: Mapping[str, int]) -> None:
        self._directory, self._limits = directory, limits

    def create(self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Store a new batch and return it. Raises ApiError (429) if too many batches of this owner have not ended."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = self.owned_by(owner)
        open_ones = sum(batch.status not in ENDED for batch in known)
        if open_ones >= self._limits["batches"]:
            limit = self._limits["batches"]
            message = f"{open_ones} batches of this API key have not ended, limit {limit}; wait or cancel one"
            raise ApiError(429, message, code="too_many_batches", headers=((b"retry-after", b"60"),))
        ended = sorted((batch for batch in known if batch.status in ENDED), key=lambda batch: batch.created_at)
        for batch in ended[: max(0, len(ended) - 10 * self._limits["batches"])]:
            self._forget(batch)
        made = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=epoch_seconds(),
            metadata=metadata,
        )
        self.save(made)
        return made

    def save(self, batch: Batch) -> None:
        write_json(self._directory / f"{batch.id}.json", asdict(batch))

    def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises ApiError (404) if it does not exist or belongs to another owner."""
        found = self._read(self._directory / f"{batch_id}.json") if _BATCH_ID.fullmatch(batch_id) else None
        if found is None or found.owner != owner:
            raise ApiError(404, f"batch_id: no batch of yours has the id {batch_id[:80]!a}", code="batch_not_found")
        return found

    def owned_by(self, owner: str) -> list[Batch]:
        """Return all batches of an owner, the newest first."""
        own = [batch for batch in self._all() if batch.owner == owner]
        return sorted(own, key=lambda batch: (-batch.created_at, batch.id))

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self._all() if batch.status not in ENDED]

    def ask_cancel(self, batch: Batch) -> None:
        (self._directory / f"{batch.id}.cancel").touch()

    def is_cancelled(self, batch: Batch) -> bool:
        return (self._directory / f"{batch.id}.cancel").exists()

    def lock(self, batch: Batch) -> int | None:
        """Lock the batch for this process. Returns a file descriptor to close after the run, or None if another process
        runs the batch."""
        lock = os.open(self._directory / f"{batch.id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError:
            os.close(lock)
            raise
        return lock

    def _all(self) -> list[Batch]:
        found = [self._read(path) for path in self._directory.glob("batch_*.json")]
        return [batch for batch in found if batch is not None]

    def _forget(self, batch: Batch) -> None:
        for suffix in ("json", "lock", "cancel"):
            (self._directory / f"{batch.id}.{suffix}").unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> Batch | None:
        try:
            return Batch(**json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
