"""Decodes types with one scale per block: Q4_0 to Q8_0, Q8_K, IQ4_NL, MXFP4, TQ1_0, TQ2_0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runtime.loading.gguf.bits import double_words, fields, halves, nibbles, spread

IQ4_LEVELS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
# Values of a 4-bit float with two exponent bits, doubled; the scale is halved in return.
MXFP4_LEVELS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, None, 2:]).view_as(out)).sub_(8).mul_(halves(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, None, 4:]).view_as(out)).mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def five_bits(blocks: Tensor, high: int) -> Tensor:
    """Unpack 32 values of 5 bits: low bits from the nibbles after byte high + 4, fifth bits from the four bytes at
    `high`."""
    fifth = fields(blocks[:, high : high + 4], 1, 8).view(-1, 32)
    return nibbles(blocks[:, None, high + 4 :]).view(-1, 32) | fifth << 4


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(five_bits(blocks, 2)).sub_(16).mul_(halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(five_bits(blocks, 4)).mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(halves(blocks, 0))


def _q8_k(blocks: Tensor, out: Tensor) -> None:
    scale = double_words(blocks, 0, 4).view(torch.float32)
    out.copy_(blocks[:, 4:260].view(torch.int8)).mul_(scale)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    index = nibbles(blocks[:, None, 2:]).int().view(-1)
    out.copy_(IQ4_LEVELS.index_select(0, index).view_as(out)).mul_(halves(blocks, 0))


def mxfp4_scales(blocks: Tensor) -> Tensor:  # [n, 1]
    """Return the powers of two, halved because the levels are doubled."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=2), (exponent - 1) << 23)
    return bits.view(torch.float32)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    index = nibbles(blocks[:, None, 1:]).int().view(-1)
    out.copy_(MXFP4_LEVELS.index_select(0, index).view_as(out)).mul_(mxfp4_scales(blocks))


def tq1_digits(blocks: Tensor) -> Tensor:  # [n, 256]
    """Unpack five ternary digits per byte. A byte is a fraction of 256: times 3**i modulo 256, its top digit is digit
    i."""
    n = blocks.shape[0]
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = [
        (blocks[:, None, 0:32] * powers).view(n, -1),
        (blocks[:, None, 32:48] * powers).view(n, -1),
        (blocks[:, None, 48:52] * powers[:4]).view(n, -1),
    ]
    return torch.cat(parts, dim=1).short() * 3 >> 8


def _tq1_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(tq1_digits(blocks)).sub_(1).mul_(halves(blocks, 52))


def tq2_digits(blocks: Tensor) -> Tensor:  # [n, 2, 4, 32]
    return spread(blocks[:, :64].reshape(-1, 2, 32), 2, 4)


def _tq2_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(tq2_digits(blocks).view_as(out)).sub_(1).mul_(halves(blocks, 64))


SIMPLE_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
