"""The API keys and admin keys of the server, which can be replaced while it runs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from quire.config.server import AccessConfig

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")  # the last two are sent by Anthropic's and Azure's clients
CLIENT_HEADER = b"x-quire-client"  # the client for whom a router sends a request
_PERSON = b"quire client"  # BLAKE2 personalization


class KeyRing:
    """Holds the digests of API keys and admin keys, and checks the key that a request brings. `version` counts how
    often the keys were replaced."""

    def __init__(self, access: AccessConfig) -> None:
        self.version = 0
        self.replace(access)

    def replace(self, access: AccessConfig) -> None:
        """Replace all keys. Requests from now on need one of these."""
        self.version += 1
        self._api = [bytes.fromhex(digest) for digest in access.key_digests]
        self._routers = [bytes.fromhex(digest) for digest in access.router_digests]
        self._admin = [bytes.fromhex(digest) for digest in access.admin_digests]
        self.client_digests = tuple(digest for digest in access.key_digests if digest not in access.router_digests)
        self.shares_cache = access.shares_cache

    @property
    def asks_for_key(self) -> bool:
        return bool(self._api)

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def owner(self, headers: dict[bytes, bytes], *, is_admin: bool) -> str | None:
        """Return the digest of the request's key, "" if the server needs no key, or None if the request must be
        refused.

        A request with a router's key belongs to the client that the router names, and each client has its own digest.
        The key is compared with all keys in constant time.
        """
        keys = self._admin if is_admin else self._api
        if not keys:
            return ""
        digest = hashlib.sha256(_key(headers)).digest()
        if not _is_among(digest, keys):
            return None
        if not is_admin and (client := headers.get(CLIENT_HEADER)) and _is_among(digest, self._routers):
            return _client_owner(digest, client)
        return digest.hex()

    def owners_of(self, key: str) -> tuple[str, ...]:
        """Return the owners that requests of a client with this key can have: the key's digest if it is an API key of
        this server, else one digest per router, because any router may have such a client. Empty if no such request is
        possible."""
        digest = hashlib.sha256(key.encode()).digest()
        if _is_among(digest, self._api):
            return (digest.hex(),)
        return tuple(_client_owner(router, digest.hex().encode()) for router in self._routers)

    def is_router(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request names its client and has a router's key, so that the name counts."""
        if not self._routers or CLIENT_HEADER not in headers:
            return False
        return _is_among(hashlib.sha256(_key(headers)).digest(), self._routers)


def _client_owner(router: bytes, client: bytes) -> str:
    """Return the owner of requests that a router sends for a client: a digest of the router's key and the client's
    name."""
    return hashlib.blake2b(router + client, digest_size=32, person=_PERSON).hexdigest()


def _is_among(digest: bytes, known: list[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, one) for one in known]
    return any(matches)


def raw_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the header value that holds the request's key, with its scheme; empty if there is none. It names the
    client to routers, which need not check the key."""
    return next((headers[name] for name in KEY_HEADERS if name in headers), b"")


def _key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return next((headers[name].strip() for name in KEY_HEADERS[1:] if name in headers), b"")
