"""The server's API keys: where they are read from, and their digests. The keys themselves are never logged or sent
on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.types.errors import ConfigError

MAX_KEY = 512  # characters
MAX_KEYS = 1_000
MAX_FILE_BYTES = 2**20


class KeyDigests(NamedTuple):
    """The digests of all API keys (`key_digests`, which include those of routers), of admin keys and of router keys."""

    key_digests: tuple[str, ...]
    admin_digests: tuple[str, ...]
    router_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """Keys from flags and environment variables, and paths of key files. `digests` reads the files again at every
    call."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key_file: str | None = None
    router_keys: tuple[str, ...] = field(default=(), repr=False)
    router_key_file: str | None = None
    made_admin_key: str | None = field(default=None, repr=False)  # one of admin_keys: generated at the start

    def digests(self) -> KeyDigests:
        """Return the digests of all keys. Raises ConfigError naming the file or key at fault."""
        clients = _from("api_key", self.api_keys, "api_key_file", self.api_key_file)
        routers = _from("router_key", self.router_keys, "router_key_file", self.router_key_file)
        admin = _from("admin_key", self.admin_keys, "admin_key_file", self.admin_key_file)
        if set(routers) & set(clients):
            raise ConfigError("router_key_file", "holds an API key of clients", "give routers a key of their own")
        api = (*clients, *routers)
        if set(admin) & set(api):
            raise ConfigError("admin_key", "is also an API key", "choose another, so that API clients are no admins")
        return KeyDigests(api, admin, routers)


def _from(setting: str, keys: tuple[str, ...], file_setting: str, file: str | None) -> tuple[str, ...]:
    in_file = () if file is None else digests(file_setting, read_key_file(file_setting, file))
    return tuple(dict.fromkeys((*digests(setting, keys), *in_file)))


def read_key_file(setting: str, path: str) -> list[str]:
    """Return the keys in a file, one per line. Empty lines and lines that begin with # are skipped."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(setting, f"{path} cannot be read: {error}", "give a text file") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(setting, f"{path} is larger than {MAX_FILE_BYTES:,} bytes", "write one key per line")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(setting, f"{path} holds no key", "write one key per line")
    return keys


def digests(setting: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the SHA-256 of each key, in hex. Raises ConfigError for an invalid key; the error never contains it."""
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
