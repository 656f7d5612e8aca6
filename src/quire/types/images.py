"""Images of a prompt, in the form that the serving layer, the engine and the workers exchange."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, shake_256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array

KEY_BYTES = 32
MAX_PIXEL_BYTES = 48 * 2**20  # of all images of a request, because one message carries them
_SIGN = 1 << 31


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt. It replaces `rows` * `columns` placeholder tokens, row by row, from token `start` on. After
    each row come `gap` other tokens, which are part of the image's span too.

    `pixels` are its bytes after resizing: red, green and blue of every pixel, row by row. `key` is the hash of content
    and shape: images with equal keys are the same image.
    """

    start: int
    rows: int  # of tokens
    columns: int
    pixels: bytes
    key: bytes
    gap: int = 0
    size: tuple[int, int] = (0, 0)  # height and width before resizing, if the picture's tokens depend on them
    among: PromptImage | None = None  # the same picture as it is shown in a prompt with further ones, if that differs
    # Of a picture whose `start` is not set yet: its tiles, row by row, which come before it in the prompt.
    tiles: tuple[PromptImage, ...] = ()
    tiles_across: int = 0  # tiles in a row

    @property
    def num_tokens(self) -> int:
        """All tokens of the span."""
        return self.rows * (self.columns + self.gap)

    @property
    def num_placeholders(self) -> int:
        return self.rows * self.columns

    @property
    def num_added(self) -> int:
        """Tokens that a prompt gains when the placeholders of this picture and of its tiles, one each, become spans."""
        return sum(piece.num_tokens - 1 for piece in (*self.tiles, self))

    def placeholders_before(self, index: int) -> int:
        """Return how many of the first `index` tokens of the span are placeholders."""
        row, column = divmod(index, self.columns + self.gap)
        return row * self.columns + min(column, self.columns)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def shown_together(images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
    """Return the images of one prompt as they are shown in it."""
    if len(images) > 1:
        return tuple(image.among or image for image in images)
    return tuple(replace(image, among=None) if image.among else image for image in images)


def image_key(rows: int, columns: int, pixels: bytes, size: tuple[int, int] = (0, 0)) -> bytes:
    """Return the hash of an image's content and shape. `size`: see PromptImage."""
    shape = b"%d %d %d %d " % (rows, columns, *size) if any(size) else b"%d %d " % (rows, columns)
    return blake2b(shape + pixels, digest_size=KEY_BYTES).digest()


def key_tokens(tokens: TokenIds, images: Sequence[PromptImage]) -> bytes:
    """Return the int32 bytes that key the blocks of a prompt in the prefix cache.

    The placeholder tokens of an image are replaced by negative values made from the image's key. So prompts with
    different images share no block from the image on.
    """
    if not images:
        return tokens.tobytes()
    keyed = tokens[:]
    for image in images:
        numbers = array("I", shake_256(image.key).digest(4 * image.num_tokens))
        if sys.byteorder == "big":
            numbers.byteswap()
        keyed[image.start : image.end] = array("i", [(number | _SIGN) - 2 * _SIGN for number in numbers])
    return keyed.tobytes()
