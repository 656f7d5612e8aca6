"""The keys that open the server, which can be replaced while it runs."""

from __future__ import annotations

import hashlib
import hmac

from quire.config.server import AccessConfig

_HEADERS = (b"x-api-key", b"api-key")  # as Anthropic's and Azure's clients send a key


class KeyRing:
    """Holds digests of the API keys and the admin keys, and finds out whether a request brings one of them."""

    def __init__(self, access: AccessConfig) -> None:
        self.replace(access)

    def replace(self, access: AccessConfig) -> None:
        """Requests from now on need one of these keys."""
        self._api = [bytes.fromhex(digest) for digest in access.key_digests]
        self._admin = [bytes.fromhex(digest) for digest in access.admin_digests]
        self.key_digests, self.shares_cache = access.key_digests, access.shares_cache

    @property
    def asks_for_key(self) -> bool:
        return bool(self._api)

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def owner(self, headers: dict[bytes, bytes], *, is_admin: bool) -> str | None:
        """Return the digest of the key that a request brings, "" where none is asked for, None if it must be refused.

        Compares with every key, in time that tells nothing about any.
        """
        keys = self._admin if is_admin else self._api
        if not keys:
            return ""
        digest = hashlib.sha256(_key(headers)).digest()
        matches = [hmac.compare_digest(digest, known) for known in keys]
        return digest.hex() if any(matches) else None


def _key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return next((headers[name].strip() for name in _HEADERS if name in headers), b"")
