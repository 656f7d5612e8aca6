"""Counter-based random numbers: one uniform number per row and token, without state.

The number depends only on the request's seed, the sample's index and the token's position in the output: not on the
row, the batch, preemption or recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment and multipliers
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Streams:
    """The random stream of every row: SplitMix64, seeded with a hash of (seed, sample index)."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._starts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._host = self._starts.numpy() if device.type == "cpu" else None  # same memory: numpy writes it faster

    def put(self, row: int, seed: int, sample_index: int) -> None:
        start = stream_start(seed, sample_index)
        if self._host is not None:
            self._host[row] = start
        else:
            self._starts[row].fill_(start)

    def uniform(self, rows: Tensor, num_outputs: Tensor) -> Tensor:  # [G], [G] -> [G] float64
        """Return a number in (0, 1) with 52 random bits for the next token of each of `rows`, which has generated
        `num_outputs` tokens."""
        state = self._starts.index_select(0, rows) + (num_outputs + 1) * _signed(_GAMMA)
        state = (state ^ _shift_right(state, 30)) * _signed(_MIX_1)
        state = (state ^ _shift_right(state, 27)) * _signed(_MIX_2)
        state = state ^ _shift_right(state, 31)
        return (_shift_right(state, 12).double() + 0.5) * 2.0**-52


@lru_cache(maxsize=1024)  # all beams of a request share one and are added repeatedly
def stream_start(seed: int, sample_index: int) -> int:
    """Return the start of a row's stream: an int64 hash of seed and sample index."""
    return _signed(mix(mix(seed + _GAMMA) ^ (sample_index * _GAMMA)))


def stream_starts(seeds: Sequence[int], sample_indices: Sequence[int]) -> Longs:  # [rows]
    """Return `stream_start` of many rows at once."""
    state = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + np.uint64(_GAMMA))
    indices = np.array(sample_indices, dtype=np.uint64)
    return _mix_all(state ^ (indices * np.uint64(_GAMMA))).view(np.int64)


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def mix(value: int) -> int:
    """Apply SplitMix64's finalizer on the host: every input bit affects every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Return the int64 with the same bits. torch multiplies int64 modulo 2**64."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
