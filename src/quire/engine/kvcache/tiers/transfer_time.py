"""Estimates how long it takes to copy KV blocks between the device and host memory, from the copies made so far."""

from __future__ import annotations

from quire.types.transfer import TransferReport

_ASSUMED_BANDWIDTH = 4e9  # bytes per second, until a copy was measured
_ASSUMED_SECONDS = 1e-4  # for a block of unknown size, until a copy was measured
_DECAY = 0.8  # every report multiplies the weight of all earlier ones by this
_MEASURE_AFTER = 8  # recomputes decided by an estimate, after which it is measured again; doubles every time


class _Direction:
    """Seconds per block in one direction; None before a copy was measured."""

    def __init__(self) -> None:
        self._blocks, self._seconds = 0.0, 0.0

    @property
    def seconds(self) -> float | None:
        return self._seconds / self._blocks if self._blocks else None

    def note(self, blocks: int, seconds: float) -> None:
        if blocks:
            self._blocks = self._blocks * _DECAY + blocks
            self._seconds = self._seconds * _DECAY + seconds


class TransferTime:
    """Estimates the seconds to save a block to host memory and to load it again. A direction that was never measured is
    assumed to be as fast as the other."""

    def __init__(self, block_bytes: int) -> None:
        self._assumed = block_bytes / _ASSUMED_BANDWIDTH if block_bytes else _ASSUMED_SECONDS
        self._save, self._load = _Direction(), _Direction()
        self._num_recomputes = self._measure_after = _MEASURE_AFTER

    def apply_report(self, report: TransferReport) -> None:
        self._save.note(report.num_saved, report.save_seconds)
        self._load.note(report.num_loaded, report.load_seconds)
        if report.num_saved:
            self._num_recomputes = 0

    def seconds(self, num_saved: int, num_loaded: int) -> float:
        """Estimate the time to save `num_saved` blocks and to load `num_loaded`."""
        save, load = self._save.seconds, self._load.seconds
        save = save if save is not None else load if load is not None else self._assumed
        return num_saved * save + num_loaded * (save if load is None else load)

    def note_swap(self) -> None:
        """Note that blocks were swapped out: measure again soon if later estimates lead to recomputing."""
        self._measure_after = _MEASURE_AFTER

    def note_recompute(self) -> bool:
        """Note that blocks were recomputed because of the estimate. Returns whether to measure it again now."""
        self._num_recomputes += 1
        if self._num_recomputes <= self._measure_after:
            return False
        self._measure_after *= 2
        return True
