"""Chooses tokens by Triton kernels from parameters stored by row on the device, so that steps can be captured."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.triton.masks import apply_masks
from quire.kernels.triton.sampling import SampleSpace, sample
from quire.kernels.triton.sampling_filters import FilterSpace
from quire.kernels.triton.sampling_weights import RowParameters
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.rng import stream_starts
from quire.runtime.sampling.row_masks import RowMasks
from quire.runtime.sampling.samples import Samples
from quire.runtime.sampling.transforms.transform import Step
from quire.runtime.transfer import Uploader
from quire.types.step import Ints, Masks, NewRow


class _Batch(NamedTuple):
    rows: Tensor  # [S] int32
    top_k_top_p: bool


class TritonChoice:
    """Chooses the tokens of all rows in one pass over the logits; rows with top_k or top_p need a second pass.

    Parameters of new rows are uploaded together, before the next batch is masked or chosen.
    """

    takes_any_dtype = True

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, num_samples: int | None = None) -> None:
        self.vocab_size, self._device = vocab_size, device
        self._parameters = RowParameters.make(num_rows, device)
        self._space = SampleSpace.make(num_samples or num_rows, vocab_size, device, filtered=True)
        self.masks = RowMasks(num_rows, vocab_size, device)
        self._uploader = Uploader(device)
        self._waiting: dict[int, NewRow] = {}
        self._filtered: npt.NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)  # rows with top_k or top_p
        self._filtered_rows: set[int] = set()  # the same: quicker to change

    def add(self, new: NewRow) -> None:
        sampling = new.sampling
        self._waiting[new.row] = new
        has_filter = sampling.top_p < 1.0 or 0 < sampling.top_k < self.vocab_size
        self._set_filtered(new.row, has_filter and not sampling.is_greedy)

    def remove(self, row: int) -> None:
        self._waiting.pop(row, None)
        self._set_filtered(row, False)

    def prepare(self, rows: Ints) -> _Batch:
        return _Batch(self._uploader.upload(rows.astype(np.int32))[0], self.needs_top_k_top_p(rows))

    def mask(self, logits: Tensor, masks: Masks, prepared: _Batch, samples: Samples) -> None:
        """Apply masks, see Choice.mask. Masks are kept on the device if each masked row has one sample. A row that
        verifies a draft has one mask per sample; these are not kept."""
        self.upload_parameters()
        masked = samples.rows[masks.samples]
        if len(masked) and np.bincount(samples.rows)[masked].max() > 1:
            self.masks.forget(masked)
            lines, bits = self._uploader.upload(masks.samples, masks.bits.view(np.int32))
            apply_masks(logits, lines, bits)
            return
        self.masks.supply(samples.rows, masks)
        self.masks.apply(logits, prepared.rows)
        self.masks.mark_read()

    def forget_masks(self, rows: Ints) -> None:
        self.masks.forget(rows)

    def choose(self, logits: Tensor, prepared: _Batch, step: Step) -> Tensor:  # [S]
        self.upload_parameters()
        token_ids = torch.empty(len(prepared.rows), dtype=torch.int64, device=self._device)
        lengths = step.samples.on_device
        self.choose_into(token_ids, logits, prepared.rows, lengths, step.history, top_k_top_p=prepared.top_k_top_p)
        return token_ids

    def choose_into(
        self,
        token_ids: Tensor,
        logits: Tensor,
        rows: Tensor,
        lengths: Tensor,
        history: TokenHistory,
        *,
        top_k_top_p: bool,
    ) -> None:
        """Fill token_ids [S] for `rows` [S] after `lengths` [S] tokens of each; negative rows are padding.

        Waits for nothing, so it can be captured. `top_k_top_p` must be true if any of the rows has top_k or top_p. New
        parameters must have been uploaded.
        """
        space = _first(self._space, len(rows), top_k_top_p=top_k_top_p)
        sample(logits, rows, lengths, self._parameters, history.num_prompt, space, token_ids)

    def needs_top_k_top_p(self, rows: Ints) -> bool:
        """Whether one of `rows` has top_k or top_p."""
        return bool(self._filtered_rows) and bool(self._filtered[rows].any())

    def upload_parameters(self) -> None:
        """Upload the parameters of new rows, and discard the masks of the rows' former sequences."""
        if not self._waiting:
            return
        news = self._waiting.values()
        asked = [new.sampling for new in news]
        rows = np.fromiter(self._waiting, dtype=np.int64)
        self.masks.forget(rows)
        where, *values = self._uploader.upload(
            rows,
            np.array([each.temperature for each in asked], dtype=np.float32),
            np.array([each.top_k for each in asked], dtype=np.int32),
            np.array([each.top_p for each in asked], dtype=np.float64),
            np.array([_log(each.min_p) for each in asked], dtype=np.float32),
            stream_starts([new.seed for new in news], [new.sample_index for new in news]),
        )
        for target, numbers in zip(self._parameters, values, strict=True):
            target.index_copy_(0, where, numbers)
        self._waiting.clear()

    def check(self) -> None:
        assert set(np.flatnonzero(self._filtered).tolist()) == self._filtered_rows

    def _set_filtered(self, row: int, is_filtered: bool) -> None:
        if is_filtered == (row in self._filtered_rows):
            return
        (self._filtered_rows.add if is_filtered else self._filtered_rows.remove)(row)
        self._filtered[row] = is_filtered


def _log(min_p: float) -> float:
    return math.log(min_p) if min_p > 0.0 else -math.inf


def _first(space: SampleSpace, entries: int, *, top_k_top_p: bool) -> SampleSpace:
    """The part of a space that a batch of so many entries uses."""
    filters = None
    if top_k_top_p and space.filters is not None:
        filters = FilterSpace(*(memory[:entries] for memory in space.filters))
    return SampleSpace._make([*(memory[:entries] for memory in space[:-1]), filters])
