"""The seal of a block that is carried between engines: its key, layout and size, and a checksum of these and of its
bytes."""

from __future__ import annotations

import struct
from hashlib import blake2b

from quire.config.parallel import RankPlace
from quire.runtime.transport.base import TransportError

KEY_BYTES = 32
_MAGIC, VERSION = b"QUIREKVT", 1
_FIELDS = struct.Struct("<8sI32s32sQ")  # magic, version, key, layout, bytes of the block
_DIGEST_BYTES = 32
SEAL_BYTES = _FIELDS.size + _DIGEST_BYTES


def layout_digest(namespace: str, dtype: str, shape: tuple[int, int], place: RankPlace) -> bytes:
    """Return a digest of everything that two engines must agree on for one to read a block of the other: the model's
    namespace (weights, dtypes, block size), the dtype and shape of a block in host memory, and the part of a block
    that a rank has."""
    part = place.rank, place.config.tensor, place.config.pipeline
    text = "\0".join((namespace, dtype, *map(str, shape), *map(str, part)))
    return blake2b(text.encode(), digest_size=32, person=b"quire layout").digest()


def make_seal(layout: bytes, key: bytes, block: memoryview) -> bytes:
    fields = _FIELDS.pack(_MAGIC, VERSION, key, layout, len(block))
    return fields + _digest(fields, block)


def check_seal(seal: bytes, layout: bytes, key: bytes, block: memoryview, peer: str) -> None:
    """Raise TransportError unless `block` has the bytes that were sealed under this key and layout."""
    fields = bytes(seal[: _FIELDS.size])
    if fields != _FIELDS.pack(_MAGIC, VERSION, key, layout, len(block)):
        raise TransportError("corrupt", f"a block of {peer} has another key, model, layout, size or version")
    if _digest(fields, block) != bytes(seal[_FIELDS.size :]):
        raise TransportError("corrupt", f"the checksum of a block of {peer} does not match")


def _digest(fields: bytes, block: memoryview) -> bytes:
    digest = blake2b(fields, digest_size=_DIGEST_BYTES)
    digest.update(block)
    return digest.digest()
