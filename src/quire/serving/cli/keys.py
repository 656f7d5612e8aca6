"""Where keys come from, and that no empty or repeated one is taken for a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from quire.types.errors import ConfigError

MAX_KEY = 512  # characters
MAX_KEYS = 1_000


def read_key_file(path: str) -> list[str]:
    """The keys in a file, one per line; lines that are empty or begin with # are passed over."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("api_key_file", f"{path} cannot be read: {error}", "give a text file") from None
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError("api_key_file", f"{path} holds no key", "write one key per line")
    return keys


def digests(setting: str, keys: Iterable[str]) -> tuple[str, ...]:
    """SHA-256 of each key, in hex. Raises ConfigError for what cannot be one; never shows it."""
    found = []
    for key in keys:
        if not key.strip():
            raise ConfigError(setting, "is empty", "give a key, or leave it out to ask for none")
        if len(key) > MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
            wanted = f"must be at most {MAX_KEY} ASCII characters without spaces"
            raise ConfigError(setting, wanted, "make one with `openssl rand -hex 24`")
        found.append(hashlib.sha256(key.encode()).hexdigest())
    if len(found) > MAX_KEYS:
        raise ConfigError(setting, f"has {len(found)} keys, limit {MAX_KEYS}", "give fewer")
    return tuple(dict.fromkeys(found))
