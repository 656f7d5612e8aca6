"""The properties of a request outside its body: id, API key, flags, and the salt that separates prefix caches."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from quire.engine.kvcache.keys import frame

_PERSON = b"quire cache salt"  # BLAKE2 personalization


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The properties of one request outside its body. `principal` is the digest of its API key."""

    request_id: str
    named_it: bool  # the client chose the id, so it may not be unique
    principal: str
    explain: bool
    strict: bool  # whether parameters without effect are errors
    received_at: float
    warnings: tuple[str, ...] = ()  # about query parameters
    shares_cache: bool = False  # whether clients with different keys share cached prompts
    num_calls: int = 1  # calls that the HTTP request makes at once, including this one

    def salt(self, asked: str) -> str:
        """Return the cache salt of the request's prompts. Clients with different keys do not share cached prompts,
        whatever salt they send, unless the operator allows it."""
        return cache_salt(self.principal, asked, is_shared=self.shares_cache)

    def engine_ids(self, prefix: str, asked: str | None, count: int) -> list[str]:
        """Return `count` unique engine request ids, which contain the id that the client asked for, if any."""
        base = f"{prefix}-{self.request_id if asked is None else asked}"
        if self.named_it or asked is not None:
            base += f"~{secrets.token_hex(8)}"  # because a client may send the same id with every request
        return [base] if count == 1 else [f"{base}.{place}" for place in range(count)]


def cache_salt(principal: str, asked: str, *, is_shared: bool = False) -> str:
    """Return the cache salt of a client's prompts. `principal` is the digest of its API key, empty if the server has no
    keys; `asked` is the salt that the client sent. With `is_shared`, clients with different keys share one cache.

    The hash is keyed by the principal, so a salt cannot be made without knowing that key.
    """
    key = b"" if is_shared else bytes.fromhex(principal)
    if not key and not asked:
        return ""
    framed = frame(b"asked", asked.encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(framed, digest_size=32, key=key, person=_PERSON).hexdigest()
