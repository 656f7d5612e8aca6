"""Sampling by the compiled kernels: masks, and one token for each row of logits."""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native.loader import open_library
from quire.kernels.native.weights import LinearWeights

Longs = npt.NDArray[np.int64]


class _Columns(Structure):
    """Mirrors ChoiceColumns of choose.h."""

    _fields_ = tuple((name, c_void_p) for name in ("temperature", "log_min_p", "top_k", "top_p", "start"))


class RowChoices:
    """The sampling parameters of each row. A row that was never set is greedy."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)  # 0: greedy
        self._log_min_p = np.full(num_rows, -math.inf, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float64)
        self._start = np.zeros(num_rows, dtype=np.int64)
        columns: tuple[npt.NDArray[Any], ...] = (
            self.temperature, self._log_min_p, self._top_k, self._top_p, self._start,
        )  # fmt: skip
        self._columns = _Columns(*(column.ctypes.data for column in columns))
        self._address = ctypes.addressof(self._columns)
        self._library = open_library()

    def set(self, row: int, temperature: float, min_p: float, top_k: int, top_p: float, start: int) -> None:
        """Set the parameters of a row. start: initial state of its random stream."""
        self.temperature[row], self._start[row] = temperature, start
        self._log_min_p[row] = math.log(min_p) if min_p > 0.0 else -math.inf
        self._top_k[row], self._top_p[row] = top_k, top_p

    def make_greedy(self, row: int) -> None:
        self.temperature[row] = 0.0

    def choose(self, logits: Tensor, rows: Longs, lengths: Tensor, num_prompt: Tensor) -> Tensor:
        """Sample token ids [samples] from logits [samples, vocab], which are overwritten. An id is negative if no token
        can be chosen.

        rows, lengths [samples]: the row of each sample, and the number of its tokens so far, of which the first
        num_prompt [rows] are the prompt.
        """
        samples, size = logits.shape
        _check(logits)
        tokens = torch.empty(samples, dtype=torch.int64)
        of_samples = _addresses(samples, rows, lengths, num_prompt)
        self._library.quire_choose(logits.data_ptr(), samples, size, self._address, *of_samples, tokens.data_ptr())
        return tokens

    def choose_by_head(
        self, states: Tensor, head: LinearWeights, rows: Longs, lengths: Tensor, num_prompt: Tensor
    ) -> Tensor:
        """Multiply hidden states [samples, inputs] by the weight of an LM head and sample like `choose`. The logits
        stay in the kernels' own memory."""
        samples, weight, bias = len(states), head.weight, head.bias
        _check(states)
        assert (weight.dtype, weight.inputs) == (torch.float32, states.shape[1])
        assert bias is None or (bias.dtype, bias.shape, bias.is_contiguous()) == (
            torch.float32,
            (weight.outputs,),
            True,
        )
        tokens = torch.empty(samples, dtype=torch.int64)
        of_samples = _addresses(samples, rows, lengths, num_prompt)
        done = self._library.quire_choose_by_head(
            weight.format, states.data_ptr(), weight.inputs, weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(), samples, weight.outputs, self._address, *of_samples,
            tokens.data_ptr(),
        )  # fmt: skip
        if not done:
            raise ValueError(f"this CPU has no kernel for float32 rows and format {weight.format}")
        return tokens


def mask_logits(logits: Tensor, places: Longs, bits: npt.NDArray[np.uint32]) -> None:
    """Set logits of disallowed tokens to minus infinity. Row i of bits [masked, words] applies to row places[i] of the
    logits; tokens past the end of the bits are disallowed."""
    _check(logits)
    assert places.dtype == np.int64
    assert bits.dtype.itemsize == 4
    assert places.flags.c_contiguous
    assert bits.flags.c_contiguous
    assert len(places) == len(bits)
    assert not len(places) or (places.min() >= 0 and places.max() < len(logits))
    open_library().quire_mask_logits(
        logits.data_ptr(), logits.shape[1], places.ctypes.data, bits.ctypes.data, len(places), bits.shape[1]
    )


def _addresses(samples: int, rows: Longs, lengths: Tensor, num_prompt: Tensor) -> tuple[int, int, int]:
    assert rows.dtype == np.int64
    assert rows.flags.c_contiguous
    for numbers in (lengths, num_prompt):
        assert (numbers.dtype, numbers.is_contiguous()) == (torch.int64, True)
    assert len(rows) == len(lengths) == samples
    return rows.ctypes.data, lengths.data_ptr(), num_prompt.data_ptr()


def _check(logits: Tensor) -> None:
    assert (logits.dtype, logits.is_contiguous(), logits.device.type) == (torch.float32, True, "cpu")
