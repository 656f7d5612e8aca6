"""Reads JSON objects from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path

from quire.runtime.loading.mapping import refuse_pointer
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
    refuse_pointer(text, file)
    return parse_json(text, file)


def parse_json(text: bytes, file: str, what: str = "") -> dict[str, object]:
    """Return the one object in `text`. Refuses duplicate keys at any depth. A byte order mark, which editors on Windows
    write, is skipped. `what`: the part of the file that errors name."""
    place = f"{what} " if what else ""
    if not text.strip():
        raise ModelLoadError(file, f"{place}is empty", fix="download it again")
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(file, f"{place}is not valid JSON: {error}", fix="download it again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(file, f"{place}must hold a JSON object", fix="download it again")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is given twice")
    return result
