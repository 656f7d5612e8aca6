"""Bit-unpacking helpers shared by the block decoders."""

from __future__ import annotations

import torch
from torch import Tensor


def halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes start..stop as unsigned 16-bit values, in int32 [n, words]."""
    return blocks[:, start:stop].contiguous().view(torch.int16).int() & 0xFFFF


def double_words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes start..stop as 32-bit patterns, int32 [n, words]. Mask after shifting: the sign bit is extended."""
    return blocks[:, start:stop].contiguous().view(torch.int32)


def nibbles(packed: Tensor) -> Tensor:
    """Unpack the low nibbles of each group of bytes, then its high nibbles: [n, groups, width] -> [n, groups, 2,
    width]."""
    packed = packed.contiguous()
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def spread(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` fields of `bits` bits, lowest first, along a new second-last axis: [..., w] -> [..., count, w]."""
    mask = (1 << bits) - 1
    return torch.stack([packed >> (bits * i) & mask for i in range(count)], dim=-2)


def fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` fields of `bits` bits, lowest first, along a new last axis: [...] -> [..., count]."""
    mask = (1 << bits) - 1
    return torch.stack([packed >> (bits * i) & mask for i in range(count)], dim=-1)
