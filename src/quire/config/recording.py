"""Settings of a recording of the engine's inputs and decisions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from quire.config.sizes import GIB, MIB, parse_size
from quire.types.errors import ConfigError

TokenForm = Literal["exact", "hashed"]
TOKEN_FORMS: tuple[TokenForm, ...] = get_args(TokenForm)
DEFAULT_LIMIT = GIB


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """The file of a recording, and the form of its tokens. An existing file is never overwritten. At `limit` bytes the
    recording stops, and the engine continues."""

    path: str
    tokens: TokenForm = "exact"  # hashed: the file shows which prompts share a prefix, but no token ids
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        if self.limit < MIB:
            raise ConfigError("record_limit", f"must be at least 1MiB, got {self.limit} bytes", "raise it")


def read_recording(record: object, tokens: object, limit: int | str | None) -> RecordingConfig | None:
    """Return the recording that the arguments request, or None. Raises ConfigError."""
    if record is None:
        for name, value in (("record_tokens", tokens), ("record_limit", limit)):
            if value is not None:
                raise ConfigError(name, "has no effect without record", "add record, or leave it out")
        return None
    record = os.fspath(record) if isinstance(record, os.PathLike) else record
    if not isinstance(record, str) or not record:
        raise ConfigError("record", f"must be a file's path, got {record!r}", 'like "run.jsonl"')
    form = next((form for form in TOKEN_FORMS if form == (tokens or "exact")), None)
    if form is None:
        raise ConfigError("record_tokens", f"{tokens!r} is unknown", f"use {' or '.join(TOKEN_FORMS)}")
    return RecordingConfig(record, form, DEFAULT_LIMIT if limit is None else parse_size("record_limit", limit))


def check_recording(recording: RecordingConfig | None, *, speculates: bool, has_files: bool) -> None:
    """Raise ConfigError for settings under which a recording with hashed tokens cannot be replayed."""
    if recording is None or recording.tokens == "exact":
        return
    if speculates:
        reason = "'hashed' hides which tokens are repeated, and speculation looks for repeated tokens"
        raise ConfigError("record_tokens", reason, 'use "exact", or leave speculative_config out')
    if has_files:
        reason = "'hashed' replaces the tokens, and the disk tier names its files by tokens"
        raise ConfigError("record_tokens", reason, 'use "exact", or leave disk_cache_path out')
