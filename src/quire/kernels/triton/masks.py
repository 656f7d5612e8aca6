"""Applies bitmasks of allowed tokens to logits in place.

Masks come either as a list, one for each of some entries, or by row: every persistent row has a bitmask in device
memory, and a flag whether it has a mask in this step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows

TILE = 4096  # tokens per program


@triton.jit
def _ban(bits_ptr, logits_ptr, words, vocab_size, TILE: tl.constexpr):
    """Store minus infinity to the logits of a tile whose bit is clear, or that lie past the bits."""
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(bits_ptr + token // 32, mask=token // 32 < words, other=0)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + token, float("-inf"), mask=banned & (token < vocab_size))


@triton.jit
def _mask_kernel(line_ptr, bits_ptr, logits_ptr, logits_stride, words, vocab_size, TILE: tl.constexpr):
    """Apply listed masks. One program per (mask, tile of the vocabulary)."""
    masked = tl.program_id(0).to(tl.int64)
    line = tl.load(line_ptr + masked).to(tl.int64)
    _ban(bits_ptr + masked * words, logits_ptr + line * logits_stride, words, vocab_size, TILE)


@triton.jit
def _row_mask_kernel(
    row_ptr, flag_ptr, bits_ptr, logits_ptr, logits_stride, words, vocab_size, TILE: tl.constexpr
):  # fmt: skip
    """Apply masks by row. One program per (entry, tile of the vocabulary)."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry).to(tl.int64)
    if tl.load(flag_ptr + row, mask=row >= 0, other=0) != 0:
        _ban(bits_ptr + row * words, logits_ptr + entry * logits_stride, words, vocab_size, TILE)


def apply_masks(
    logits: Tensor,  # [entries, vocab]: any float dtype
    lines: Tensor,  # [masked] int: the entries that have a mask, all distinct
    bits: Tensor,  # [masked, words] int32: bit t % 32 of word t // 32 is set if token t is allowed
) -> None:
    """Set logits of masked entries to minus infinity where the token is not allowed, or past the bits."""
    vocab_size = logits.shape[1]
    check_rows(logits, "logits")
    check(bits.is_contiguous() and bits.dtype == torch.int32, "bits are contiguous int32")
    check(lines.dim() == 1 and bits.dim() == 2 and len(lines) == len(bits), "a line of bits for each masked entry")
    if len(lines) == 0:
        return
    _mask_kernel[(len(lines), triton.cdiv(vocab_size, TILE))](
        lines, bits, logits, logits.stride(0), bits.shape[1], vocab_size, TILE=TILE, num_warps=4, num_stages=1
    )


def apply_row_masks(
    logits: Tensor,  # [entries, vocab]: any float dtype
    rows: Tensor,  # [entries] int: persistent row of each entry; negative: padding, unchanged
    flags: Tensor,  # [all rows] int32: 0 for rows without a mask, which are unchanged
    bits: Tensor,  # [all rows, words] int32, as in `apply_masks`
) -> None:
    """Set logits of entries whose row has a mask to minus infinity where the token is not allowed, or past the bits.

    Does not synchronize, and reads flags and bits when it runs, so it can be captured in a CUDA graph.
    """
    entries, vocab_size = logits.shape
    check_rows(logits, "logits")
    check(bits.is_contiguous() and bits.dtype == torch.int32, "bits are contiguous int32")
    check(flags.is_contiguous() and flags.dtype == torch.int32, "flags are contiguous int32")
    check(rows.shape == (entries,), "a row per entry")
    check(bits.dim() == 2 and flags.shape == (len(bits),), "a flag and a line of bits for each row")
    if entries == 0:
        return
    _row_mask_kernel[(entries, triton.cdiv(vocab_size, TILE))](
        rows, flags, bits, logits, logits.stride(0), bits.shape[1], vocab_size, TILE=TILE, num_warps=4, num_stages=1
    )
