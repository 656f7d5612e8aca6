"""Small unsigned integers packed into 32-bit words from the lowest bit on, either across word boundaries or padded per
word."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` values of `bits` bits of each row [rows, words] int32 -> [rows, count] uint8."""
    rows = len(words)
    octets = words.contiguous().view(torch.uint8)  # [rows, 4 * words]; model files are read on little-endian machines
    if bits == 8:
        return octets[:, :count].contiguous()
    if bits in (1, 2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        split = octets.unsqueeze(-1) >> shifts & ((1 << bits) - 1)
        return split.view(rows, -1)[:, :count].contiguous()
    starts = torch.arange(count) * bits
    first = starts // 8
    wide = octets.to(torch.int16)
    beyond = torch.cat((wide, wide.new_zeros(rows, 1)), dim=1)  # a padding byte, whose bits are never used
    pairs = beyond.index_select(1, first) | beyond.index_select(1, first + 1) << 8
    return (pairs >> (starts % 8).to(torch.int16) & ((1 << bits) - 1)).to(torch.uint8)


def words_of(count: int, bits: int, *, across: bool) -> int:
    """Return how many words hold `count` values."""
    return -(-count * bits // 32) if across else -(-count // (32 // bits))


def unpack_whole(words: Tensor, bits: int, count: int) -> Tensor:
    """Like `unpack`, for words that hold `32 // bits` whole values each."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    split = words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)  # [rows, words, numbers of one]
    return split.flatten(1)[:, :count].to(torch.uint8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack values below 2**bits, the inverse of `unpack`: [rows, count] -> [rows, words] int32."""
    rows, count = numbers.shape
    words = -(-count * bits // 32)
    if 32 % bits == 0:
        padded = F.pad(numbers, (0, words * (32 // bits) - count)).to(torch.int32)
        packed = torch.zeros(rows, words, dtype=torch.int32)
        for place in range(32 // bits):
            packed |= padded[:, place :: 32 // bits] << (bits * place)
        return packed
    single = numbers.unsqueeze(-1) >> torch.arange(bits, dtype=numbers.dtype) & 1  # [rows, count, bits]
    stream = torch.zeros(rows, words * 32, dtype=torch.int64)
    stream[:, : count * bits] = single.flatten(1)
    wide = (stream.view(rows, words, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)
