"""Reads JSON objects from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path

from quire.types.errors import ModelLoadError

MAX_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. Raises ModelLoadError if it is missing, too large, or not exactly one
    object."""
    file = str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(file, f"is larger than {MAX_BYTES} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(file, f"cannot be read: {error.strerror}") from None
    return parse_json(text, file)


def parse_json(text: bytes, file: str) -> dict[str, object]:
    """Return the one object in `text`. Refuses duplicate keys at any depth."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(file, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(file, "must hold a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is given twice")
    return result
