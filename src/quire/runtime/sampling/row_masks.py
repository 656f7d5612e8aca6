"""Grammar masks by row in GPU memory, where captured graphs read them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.masks import apply_row_masks
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import SideStream, Uploader
from quire.types.step import Bits, Bools, Ints, Masks


class RowMasks:
    """Device memory for one mask per row, and a flag per row: whether the row has a mask in the current step.

    A mask stays on the device until another one is supplied for its row, or until `forget`. New masks are uploaded in
    one copy on a side stream, so that the copy overlaps the forward pass.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._bits = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)  # [rows, words]
        self._flags = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._flagged: Ints = np.zeros(num_rows, dtype=np.int32)  # the host's copy of `_flags`
        self._kept: Bools = np.zeros(num_rows, dtype=np.bool_)  # rows whose line holds the mask supplied last
        self._most_words = 0  # of the widest mask so far; the words behind them are zero in all lines
        self._uploader, self._stream = Uploader(device), SideStream(device)

    def supply(self, rows: Ints, masks: Masks | None) -> None:
        """Set the masks of the next `apply`. `rows` [samples] are the rows of the step's samples. The samples in
        `masks` belong to different rows; all other rows have no mask. The caller may overwrite the bits afterwards."""
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
                self._uploader.upload_into(self._flags, flags)
                self._flagged = flags

    def forget(self, rows: Ints | Longs) -> None:
        """Upload the next masks of these rows even if `Masks.changed` is false."""
        self._kept[rows] = False

    def apply(self, logits: Tensor, rows: Tensor) -> None:
        """Set banned tokens to -inf in logits [entries, vocab] of `rows` [entries], by the masks supplied last.

        It can be captured in a graph. The caller calls `mark_read` after each launch, outside of capture.
        """
        apply_row_masks(logits, rows, self._flags, self._bits)

    def mark_read(self) -> None:
        """Have later uploads wait until the kernels launched so far have read the masks."""
        self._stream.mark_read()

    def _is_new(self, masked: Ints, masks: Masks) -> Bools:
        """Return which masks must be uploaded. If the caller does not say which masks changed, all are uploaded now and
        again next time: the caller may not have compared the next masks with these."""
        if masks.changed is None:
            self._kept[masked] = False
            return np.ones(len(masked), dtype=np.bool_)
        is_new: Bools = masks.changed | ~self._kept[masked]
        self._kept[masked] = True
        return is_new

    def _send(self, rows: Ints, bits: Bits) -> None:
        words = min(bits.shape[1], self._bits.shape[1])
        where, lines = self._uploader.upload(rows.astype(np.int64), bits[:, :words].view(np.int32))
        self._bits[:, :words].index_copy_(0, where, lines)
        if words < self._most_words:
            self._bits[:, words : self._most_words].index_fill_(0, where, 0)
        self._most_words = max(self._most_words, words)
