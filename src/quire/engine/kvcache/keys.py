"""Names for cached blocks: a digest of everything that determines their content."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 32
TOKEN_BYTES = array("i").itemsize


def frame(*fields: bytes) -> bytes:
    """Fields one after the other, each behind its length: no two lists of fields read alike."""
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as they are hashed and compared."""
    return array("i", tokens).tobytes()


def root_key(namespace: bytes, salt: str) -> bytes:
    """What all blocks of one tenant's prompts for one model begin with. The namespace stands for whatever else shapes
    keys and values: weights, adapter, dtype, block size."""
    return blake2b(frame(b"root", namespace, salt.encode("utf-8", "surrogatepass")), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: bytes) -> bytes:
    """The block that follows the one named `parent` with these tokens: a full block's, or as many as a tail has."""
    return blake2b(frame(parent, tokens), digest_size=KEY_BYTES).digest()


def chain(parent: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The keys of blocks that follow each other."""
    for tokens in blocks:
        parent = next_key(parent, tokens)
        yield parent
