"""Decodes super-blocks of 256 values whose sub-blocks have their own scales: Q2_K to Q6_K and IQ4_XS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runtime.loading.gguf.bits import fields, halves, nibbles, spread, words
from quire.runtime.loading.gguf.simple_quants import IQ4_LEVELS


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    """Sixteen sub-blocks; a byte holds a sub-block's 4-bit scale and 4-bit minimum."""
    scale = halves(blocks, 80) * (blocks[:, :16] & 15)  # [n, 16]
    minimum = halves(blocks, 82) * (blocks[:, :16] >> 4)
    values = spread(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4)  # [n, 2, 4, 32]
    _scale_and_shift(out, values, scale, minimum)


def q3_scales(blocks: Tensor) -> Tensor:  # [n, 16]
    """6-bit signed scales: low four bits in 8 bytes, high two in 4."""
    n = blocks.shape[0]
    low = nibbles(blocks[:, None, 96:104]).view(n, 16)
    high = spread(blocks[:, 104:108], 2, 4).view(n, 16)
    return halves(blocks, 108) * (low | high << 4).float().sub_(32)


def q3_levels(blocks: Tensor) -> Tensor:  # [n, 8, 32], below 8
    """Unpack two low bits and a third bit, which is stored inverted."""
    values = spread(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).view(-1, 8, 32)
    return values | spread(blocks[:, :32], 1, 8) << 2


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """Sixteen sub-blocks with 6-bit scales."""
    out.copy_(q3_levels(blocks).view_as(out)).sub_(4)
    out.view(-1, 16, 16).mul_(q3_scales(blocks)[..., None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scale, minimum = six_bit_scales(blocks)
    values = nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # [n, 4, 2, 32]
    _scale_and_shift(out, values, scale, minimum)


def five_bit_levels(blocks: Tensor) -> Tensor:  # [n, 8, 32]
    """Unpack the levels of Q5_K: four low bits, and a fifth stored separately."""
    values = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return values | spread(blocks[:, 16:48], 1, 8) << 4


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scale, minimum = six_bit_scales(blocks)
    _scale_and_shift(out, five_bit_levels(blocks), scale, minimum)


def q6_scales(blocks: Tensor) -> Tensor:  # [n, 16]
    return halves(blocks, 208) * blocks[:, 192:208].view(torch.int8)


def q6_levels(blocks: Tensor) -> Tensor:  # [n, 8, 32], below 64
    """Unpack four low bits and two high bits, which are stored separately."""
    n = blocks.shape[0]
    low = nibbles(blocks[:, :128].reshape(n, 2, 64)).view(n, 8, 32)
    high = spread(blocks[:, 128:192].reshape(n, 2, 32), 2, 4).view(n, 8, 32)
    return low | high << 4


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Sixteen sub-blocks with signed 8-bit scales."""
    out.copy_(q6_levels(blocks).view_as(out)).sub_(32)
    out.view(-1, 16, 16).mul_(q6_scales(blocks)[..., None])


def iq4_xs_scales(blocks: Tensor) -> Tensor:  # [n, 8]
    """6-bit signed scales: high two bits in a 16-bit word, low four in nibbles."""
    high = fields(words(blocks, 2, 4)[:, 0], 2, 8)  # [n, 8]
    low = fields(blocks[:, 4:8], 4, 2).view(-1, 8)
    return halves(blocks, 0) * (low | high << 4).float().sub_(32)


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """Eight sub-blocks with 6-bit scales."""
    n = blocks.shape[0]
    index = nibbles(blocks[:, 8:].reshape(n, 8, 16)).int().view(-1)
    out.copy_(IQ4_LEVELS.index_select(0, index).view_as(out))
    out.view(n, 8, 32).mul_(iq4_xs_scales(blocks)[..., None])


def six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of Q4_K and Q5_K, [n, 8] each: twelve bytes pack eight 6-bit values of each."""
    scale, minimum, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scale & 63, (rest & 15) | (scale >> 2 & 48)), dim=1)
    minima = torch.cat((minimum & 63, (rest >> 4) | (minimum >> 2 & 48)), dim=1)
    return halves(blocks, 0) * scales, halves(blocks, 2) * minima


def _scale_and_shift(out: Tensor, values: Tensor, scale: Tensor, minimum: Tensor) -> None:
    """out = scale * values - minimum, with a scale and minimum per sub-block."""
    n, count = scale.shape
    out.copy_(values.view_as(out))
    out.view(n, count, -1).mul_(scale[..., None]).sub_(minimum[..., None])


K_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
