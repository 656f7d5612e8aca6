"""Keys of KV blocks, under which the tiers store them. A key is a hash of everything that determines the block's
content: the key of the block before it and its own tokens. Tokens are int32 bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b

KEY_BYTES = 32
TOKEN_BYTES = array("i").itemsize


def frame(*fields: bytes) -> bytes:
    """Join fields, each with its length before it, so that two different lists of fields never give the same bytes."""
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def root_key(namespace: bytes, salt: str) -> bytes:
    """Return the key that precedes the first block of every sequence with this salt. The namespace identifies
    everything else that determines the content of blocks: weights, adapter, dtype, block size."""
    return blake2b(frame(b"root", namespace, salt.encode("utf-8", "surrogatepass")), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of the block that holds `tokens` and follows the block with key `parent`. The block may be
    partial."""
    return blake2b(frame(parent, tokens), digest_size=KEY_BYTES).digest()


def side_key(key: bytes, name: bytes) -> bytes:
    """Return the key of a side block of the block with this key."""
    return blake2b(frame(b"side", key, name), digest_size=KEY_BYTES).digest()


def chain_keys(parent: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the keys of consecutive blocks, given the tokens of each. `parent` is the key of the block before them."""
    for tokens in blocks:
        parent = next_key(parent, tokens)
        yield parent


def common_bytes(one: bytes, other: bytes, place: int, length: int) -> int:
    """Return how many bytes `one[:length]` and `other[place : place + length]` have in common at their start."""
    if other.startswith(one[:length], place):  # compares without a copy if `one[:length]` is all of `one`
        return min(length, len(one))
    low, high = 0, length  # the first `low` bytes are equal, the first `high` bytes are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low
