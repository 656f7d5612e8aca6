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


def apply_row_masks(logits: Tensor, rows: Tensor, flags: Tensor, bits: Tensor) -> None:
    """The same for logits [entries, vocab] of `rows` [entries], where bits [all rows, words] and flags [all rows] are
    by row; entries of padding (negative rows) and of rows whose flag is 0 are not touched."""
    masked = [entry for entry, row in enumerate(rows.tolist()) if row >= 0 and flags[row]]
    apply_masks(logits, logits.new_tensor(masked).long(), bits[rows[masked].long()])
