"""The masks of rows on a GPU, in memory that captured graphs read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.masks import apply_row_masks
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import Courier, SideStream
from quire.types.step import Bits, Bools, Ints, Masks


class RowMasks:
    """Owns a line of bits and a flag for every row: the flag says whether the row has a mask in the step at hand.

    A line stays on the device until another mask is supplied for its row. New lines go up in one copy, on a stream of
    their own, so that the copy runs beside the forward pass.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._bits = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)  # [rows, words]
        self._flags = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._flagged: Ints = np.zeros(num_rows, dtype=np.int32)  # what `_flags` holds
        self._kept: Bools = np.zeros(num_rows, dtype=np.bool_)  # lines that are the last mask supplied for their row
        self._most_words = 0  # of any mask so far; the words after them are zero in all lines
        self._courier, self._stream = Courier(device), SideStream(device)

    def supply(self, rows: Ints, masks: Masks | None) -> None:
        """Set the masks that are applied next, to samples of `rows` [samples]. The samples that `masks` names are of
        different rows; all other rows have no mask. The bits may be overwritten afterwards."""
        flags = np.zeros_like(self._flagged)
        masked, sent = rows[:0], np.zeros(0, dtype=np.intp)
        if masks is not None:
            masked = rows[masks.samples]
            flags[masked] = 1
            sent = np.flatnonzero(self._is_new(masked, masks))
        is_flagged = np.array_equal(flags, self._flagged)
        if is_flagged and not len(sent):
            return
        with self._stream.copying():
            if masks is not None and len(sent):
                self._send(masked[sent], masks.bits if len(sent) == len(masked) else masks.bits[sent])
            if not is_flagged:
                self._courier.send_into(self._flags, flags)
                self._flagged = flags

    def forget(self, rows: Ints | Longs) -> None:
        """The next masks of these rows are sent, whether they changed or not."""
        self._kept[rows] = False

    def apply(self, logits: Tensor, rows: Tensor) -> None:
        """Ban what the masks supplied last do not allow in logits [entries, vocab] of `rows` [entries].

        It can be captured. Whoever has launched it calls `mark_read`, when nothing is being captured.
        """
        apply_row_masks(logits, rows, self._flags, self._bits)

    def mark_read(self) -> None:
        """The masks supplied last are read by what was launched so far: later ones wait for that."""
        self._stream.mark_read()

    def _is_new(self, masked: Ints, masks: Masks) -> Bools:
        """Which masks are not on the device. Where the caller does not tell what changed, it need not compare the next
        masks with these ones: so those count as new again."""
        if masks.changed is None:
            self._kept[masked] = False
            return np.ones(len(masked), dtype=np.bool_)
        is_new: Bools = masks.changed | ~self._kept[masked]
        self._kept[masked] = True
        return is_new

    def _send(self, rows: Ints, bits: Bits) -> None:
        words = min(bits.shape[1], self._bits.shape[1])
        where, lines = self._courier.send(rows.astype(np.int64), bits[:, :words].view(np.int32))
        self._bits[:, :words].index_copy_(0, where, lines)
        if words < self._most_words:
            self._bits[:, words : self._most_words].index_fill_(0, where, 0)
        self._most_words = max(self._most_words, words)
