"""Tokens as bytes, and content hashes of cached blocks: digests of everything that determines a block's content."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b

KEY_BYTES = 32
TOKEN_BYTES = array("i").itemsize


def frame(*fields: bytes) -> bytes:
    """Fields one after the other, each behind its length: no two lists of fields give the same bytes."""
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def root_key(namespace: bytes, salt: str) -> bytes:
    """The hash that all chains of one salt begin with. The namespace stands for whatever else shapes keys and values:
    weights, adapter, dtype, block size."""
    return blake2b(frame(b"root", namespace, salt.encode("utf-8", "surrogatepass")), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: bytes) -> bytes:
    """The hash of the block that follows the block `parent` with these tokens: a full block's, or as many as a tail
    has."""
    return blake2b(frame(parent, tokens), digest_size=KEY_BYTES).digest()


def chain(parent: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The hashes of blocks that follow each other, given the tokens of each."""
    for tokens in blocks:
        parent = next_key(parent, tokens)
        yield parent


def common_bytes(one: bytes, other: bytes, place: int, length: int) -> int:
    """How many of the first `length` bytes of `one` are those of `other` from `place` on."""
    if one[:length] == other[place : place + length]:
        return length
    low, high = 0, length  # the first `low` agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low
