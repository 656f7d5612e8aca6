"""Masks of allowed tokens, one token after the other."""

from __future__ import annotations

from torch import Tensor


def apply_masks(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Minus infinity in the named lines of logits [entries, vocab] where a token's bit [masked, words] is not set."""
    words = [[word & 0xFFFFFFFF for word in line] for line in bits.tolist()]
    for line, mask in zip(lines.tolist(), words, strict=True):
        for token in range(logits.shape[1]):
            allowed = token // 32 < len(mask) and mask[token // 32] >> (token % 32) & 1
            if not allowed:
                logits[line, token] = float("-inf")
