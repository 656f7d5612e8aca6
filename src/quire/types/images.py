"""Images of a prompt, as they go from the serving layer through the engine to the workers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array

KEY_BYTES = 32
MAX_PIXEL_BYTES = 48 * 2**20  # of all images of a request: they travel in one message
_SIGN = 1 << 31


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image that stands for `rows` * `columns` placeholder tokens of a prompt, row by row, from token `start` on.

    `pixels` are its bytes after resizing: red, green and blue of every pixel, row by row. `key` is their hash: two
    images are the same if their keys are.
    """

    start: int
    rows: int  # of tokens
    columns: int
    pixels: bytes
    key: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def image_key(rows: int, columns: int, pixels: bytes) -> bytes:
    """Return the hash of an image's content and shape."""
    return blake2b(b"%d %d " % (rows, columns) + pixels, digest_size=KEY_BYTES).digest()


def key_tokens(tokens: TokenIds, images: Sequence[PromptImage]) -> bytes:
    """Return the int32 bytes by which the blocks of a prompt are cached. In place of an image's placeholders stand
    negative numbers, which are no tokens, made of its key: prompts with different images have no block in common from
    the image on."""
    if not images:
        return tokens.tobytes()
    keyed = tokens[:]
    for image in images:
        numbers = array("I", shake_256(image.key).digest(4 * image.num_tokens))
        if sys.byteorder == "big":
            numbers.byteswap()
        keyed[image.start : image.end] = array("i", [(number | _SIGN) - 2 * _SIGN for number in numbers])
    return keyed.tobytes()
