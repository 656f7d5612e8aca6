"""The keys that open the server, which can be replaced while it runs."""

from __future__ import annotations

import hashlib
import hmac

from quire.config.server import AccessConfig

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")  # the last two: of Anthropic's and Azure's clients
CLIENT_HEADER = b"x-quire-client"  # for whom a router asks
_PERSON = b"quire client"


class KeyRing:
    """Holds digests of the API keys and the admin keys, and finds out whether a request brings one of them. `version`
    counts how often they were replaced."""

    def __init__(self, access: AccessConfig) -> None:
        self.version = 0
        self.replace(access)

    def replace(self, access: AccessConfig) -> None:
        """Requests from now on need one of these keys."""
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
        """Return the digest of the key that a request brings, "" where none is asked for, None if it must be refused.

        A router's key stands for the client that it names: each client has a digest of its own. Compares with every
        key, in time that tells nothing about any.
        """
        keys = self._admin if is_admin else self._api
        if not keys:
            return ""
        digest = hashlib.sha256(_key(headers)).digest()
        if not _is_among(digest, keys):
            return None
        if not is_admin and (client := headers.get(CLIENT_HEADER)) and _is_among(digest, self._routers):
            return _behind_router(digest, client)
        return digest.hex()

    def owners_of(self, key: str) -> tuple[str, ...]:
        """Return what `owner` returns for requests of a client with this key: its digest if it is an API key of this
        server, else one digest for each router, which may have such a client. () if nobody can come with it."""
        digest = hashlib.sha256(key.encode()).digest()
        if _is_among(digest, self._api):
            return (digest.hex(),)
        return tuple(_behind_router(router, digest.hex().encode()) for router in self._routers)

    def is_router(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request names its client and brings the key of a router, so that the name counts."""
        if not self._routers or CLIENT_HEADER not in headers:
            return False
        return _is_among(hashlib.sha256(_key(headers)).digest(), self._routers)


def _behind_router(router: bytes, client: bytes) -> str:
    """The owner of what a client stores through a router: of the digest of the router's key, and its name for it."""
    return hashlib.blake2b(router + client, digest_size=32, person=_PERSON).hexdigest()


def _is_among(digest: bytes, known: list[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, one) for one in known]
    return any(matches)


def _key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return next((headers[name].strip() for name in KEY_HEADERS[1:] if name in headers), b"")
