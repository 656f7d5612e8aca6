"""Decodes super-blocks of 256 values stored as codebook rows with signs or offsets: IQ1_S to IQ3_S."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from quire.runtime.loading.gguf.bits import double_words, fields, halves, words
from quire.runtime.loading.gguf.codebooks import codebook

IQ1_OFFSET = 0.125


def _iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """Each 32 values: four row indices of a byte each; then 4 x 7 sign bits and a 4-bit scale in one word."""
    n = blocks.shape[0]
    pairs = blocks[:, 2:66].reshape(n, 8, 8)
    word = pairs[..., 4:].contiguous().view(torch.int32)[..., 0]  # [n, 8]
    scale = halves(blocks, 0) * (0.5 + (word >> 28 & 15)) * 0.25
    _fill(out, _rows("IQ2_XXS", pairs[..., :4]), scale, _seven_bit_signs(word))


def _iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """Each 8 values: nine bits of row index and seven of signs. Each 16 values: a 4-bit scale."""
    codes = words(blocks, 2, 66)  # [n, 32]
    scale = halves(blocks, 0) * (0.5 + fields(blocks[:, 66:74], 4, 2).flatten(1)) * 0.25
    _fill(out, _rows("IQ2_XS", codes & 511), scale, _signs_of_seven()[codes >> 9])


def _iq2_s(blocks: Tensor, out: Tensor) -> None:
    """Row indices of 8 + 2 bits, a byte of signs per 8 values, a 4-bit scale per 16."""
    high = fields(blocks[:, 66:74], 2, 4).flatten(1).int()  # [n, 32]
    scale = halves(blocks, 0) * (0.5 + fields(blocks[:, 74:82], 4, 2).flatten(1)) * 0.25
    _fill(out, _rows("IQ2_S", blocks[:, 2:34].int() | high << 8), scale, _byte_signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """A byte of row index per 4 values; per 32 values, 4 x 7 sign bits and a 4-bit scale in one word."""
    word = double_words(blocks, 66, 98)  # [n, 8]
    scale = halves(blocks, 0) * (0.5 + (word >> 28 & 15)) * 0.5
    _fill(out, _rows("IQ3_XXS", blocks[:, 2:66]), scale, _seven_bit_signs(word))


def _iq3_s(blocks: Tensor, out: Tensor) -> None:
    """Row indices of 8 + 1 bits per 4 values, a byte of signs per 8, a 4-bit scale per 32."""
    high = fields(blocks[:, 66:74], 1, 8).flatten(1).int()  # [n, 64]
    scale = halves(blocks, 0) * (1 + 2 * fields(blocks[:, 106:110], 4, 2).flatten(1))
    _fill(out, _rows("IQ3_S", blocks[:, 2:66].int() | high << 8), scale, _byte_signs(blocks[:, 74:106]))


def _iq1_s(blocks: Tensor, out: Tensor) -> None:
    """A word per 32 values: 4 x 3 high bits of row indices, a 3-bit scale, and the sign of the offset."""
    n = blocks.shape[0]
    word = words(blocks, 34, 50)  # [n, 8]
    rows = _rows("IQ1_S", blocks[:, 2:34].int() | fields(word, 3, 4).flatten(1) << 8)  # [n * 32, 8]
    offset = torch.where(word >> 15 == 0, IQ1_OFFSET, -IQ1_OFFSET)
    scale = halves(blocks, 0) * (2 * (word >> 12 & 7) + 1)
    torch.add(rows.view(n, 8, 32), offset[..., None], out=out.view(n, 8, 32)).mul_(scale[..., None])


def _iq1_m(blocks: Tensor, out: Tensor) -> None:
    """Like IQ1_S, with an offset per 8 values and a scale per 16; the block's scale is stored in the top nibbles of
    four words."""
    n = blocks.shape[0]
    word = words(blocks, 48, 56)  # [n, 4]
    top = word >> 12
    bits = top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12
    block_scale = bits.short().view(torch.float16).float()[:, None]
    scale = block_scale * (2 * fields(word, 3, 4).flatten(1) + 1)  # [n, 16]
    high = fields(blocks[:, 32:48], 4, 2).flatten(1).int()  # [n, 32]
    rows = _rows("IQ1_S", blocks[:, :32].int() | (high & 7) << 8)
    offset = torch.where(high & 8 == 0, IQ1_OFFSET, -IQ1_OFFSET)
    torch.add(rows.view(n, 32, 8), offset[..., None], out=out.view(n, 32, 8))
    out.view(n, 16, 16).mul_(scale[..., None])


def _fill(out: Tensor, rows: Tensor, scale: Tensor, signs: Tensor) -> None:
    """out = scale * rows * signs, with a scale per sub-block: [n, sub-blocks]."""
    n, count = scale.shape
    torch.mul(rows.view(n, count, -1), scale[..., None], out=out.view(n, count, -1))
    out.mul_(signs.view_as(out))


def _rows(name: str, index: Tensor) -> Tensor:
    return _table(name).index_select(0, index.int().reshape(-1))


def _byte_signs(packed: Tensor) -> Tensor:
    """Return signs: value i is negative if bit i of its byte is set. [n, bytes] -> [n, bytes, 8]."""
    return 1.0 - 2.0 * fields(packed, 1, 8)


def _seven_bit_signs(word: Tensor) -> Tensor:
    return _signs_of_seven()[fields(word, 7, 4)]  # [..., 4, 8]


@cache
def _signs_of_seven() -> Tensor:
    """Return the signs of eight values for each seven bits, [128, 8]: the number of negative ones is even."""
    bits = fields(torch.arange(128), 1, 7)
    return 1.0 - 2.0 * torch.cat((bits, bits.sum(1, keepdim=True) % 2), dim=1).float()


@cache
def _table(name: str) -> Tensor:
    return torch.from_numpy(codebook(name))


CODEBOOK_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
