"""Who asks for generation, and at which door."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from quire.engine.kvcache.keys import frame

GenerationEndpoint = Literal["chat", "completions", "fork"]
PREFIX = {"chat": "chatcmpl", "completions": "cmpl", "fork": "fork"}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the HTTP head says about a request."""

    request_id: str
    named_it: bool  # the client chose the id, so it may not be unique
    principal: str
    explain: bool
    lenient: bool
    received_at: float
    warnings: tuple[str, ...] = ()  # about the query
    shares_cache: bool = False  # with clients of other keys

    def salt(self, asked: str) -> str:
        """Clients with different keys never share cached prompts, whatever salt they send, unless the operator says."""
        return cache_salt(self.principal, asked, is_shared=self.shares_cache)

    def engine_ids(self, endpoint: GenerationEndpoint, asked: str | None, count: int) -> list[str]:
        """What the engine calls so many requests of one client, who may have asked for a name."""
        base = f"{PREFIX[endpoint]}-{self.request_id if asked is None else asked}"
        if self.named_it or asked is not None:
            base += f"~{secrets.token_hex(3)}"
        return [base] if count == 1 else [f"{base}.{place}" for place in range(count)]


_PERSON = b"quire cache salt"


def cache_salt(principal: str, asked: str, *, is_shared: bool = False) -> str:
    """The salt of a client's prompts. `principal` is the digest of its API key, empty where none is asked for; `asked`
    is what the client wants to be told apart by. With `is_shared`, clients of all keys have one cache.

    The digest is keyed by the principal: who does not know a key cannot make its salt, whatever else he sends.
    """
    key = b"" if is_shared else bytes.fromhex(principal)
    if not key and not asked:
        return ""
    framed = frame(b"asked", asked.encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(framed, digest_size=32, key=key, person=_PERSON).hexdigest()
