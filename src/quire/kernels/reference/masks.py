"""Grammar masks applied token by token in plain torch."""

from __future__ import annotations

from torch import Tensor


def apply_masks(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """Set logits [entries, vocab] to minus infinity where a token's bit is not set. Row i of bits [masked, words]
    applies to row lines[i] of the logits."""
    words = [[word & 0xFFFFFFFF for word in line] for line in bits.tolist()]
    for line, mask in zip(lines.tolist(), words, strict=True):
        for token in range(logits.shape[1]):
            allowed = token // 32 < len(mask) and mask[token // 32] >> (token % 32) & 1
            if not allowed:
                logits[line, token] = float("-inf")


def apply_row_masks(logits: Tensor, rows: Tensor, flags: Tensor, bits: Tensor) -> None:
    """Mask logits [entries, vocab], where entry i belongs to row rows[i], by bits [all rows, words] and flags [all
    rows], which are indexed by row. Entries with a negative row (padding) or with flag 0 are unchanged."""
    masked = [entry for entry, row in enumerate(rows.tolist()) if row >= 0 and flags[row]]
    apply_masks(logits, logits.new_tensor(masked).long(), bits[rows[masked].long()])
