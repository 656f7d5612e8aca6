"""Masks of allowed tokens, one bit each, applied to logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows

TILE = 4096  # tokens of a line that one program looks at


@triton.jit
def _mask_kernel(line_ptr, bits_ptr, logits_ptr, logits_stride, words, vocab_size, TILE: tl.constexpr):
    masked, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    line = tl.load(line_ptr + masked).to(tl.int64)
    word = tl.load(bits_ptr + masked * words + token // 32, mask=token // 32 < words, other=0)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + line * logits_stride + token, float("-inf"), mask=banned & (token < vocab_size))


def apply_masks(
    logits: Tensor,  # [entries, vocab]: any float dtype
    lines: Tensor,  # [masked] int: the entries that have a mask, all different
    bits: Tensor,  # [masked, words] int32: bit t % 32 of word t // 32 is set where token t is allowed
) -> None:
    """Logits of masked entries become minus infinity where the token is not allowed, or past the bits."""
    vocab_size = logits.shape[1]
    check_rows(logits, "logits")
    check(bits.is_contiguous() and bits.dtype == torch.int32, "bits are contiguous int32")
    check(lines.dim() == 1 and bits.dim() == 2 and len(lines) == len(bits), "a line of bits for each masked entry")
    if len(lines) == 0:
        return
    _mask_kernel[(len(lines), triton.cdiv(vocab_size, TILE))](
        lines, bits, logits, logits.stride(0), bits.shape[1], vocab_size, TILE=TILE, num_warps=4, num_stages=1
    )
