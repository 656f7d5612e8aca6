"""Who may find whose cached prompts: a salt for every tenant, made from its key."""

from __future__ import annotations

import hashlib

from quire.engine.kvcache.keys import frame

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
