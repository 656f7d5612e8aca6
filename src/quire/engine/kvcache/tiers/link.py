"""How long it takes to move a block between device and host, learned from what was moved."""

from __future__ import annotations

from quire.types.transfer import TransferReport

_ASSUMED_BANDWIDTH = 4e9  # bytes a second, until something was measured
_ASSUMED_SECONDS = 1e-4  # for a block of unknown size
_MEMORY = 0.8  # what an older report still counts beside the next
_STALE = 8  # decisions against moving anything, after which what they rest on is measured again; then twice as many


class _Direction:
    """Seconds per block, one way; None before something was measured."""

    def __init__(self) -> None:
        self._blocks, self._seconds = 0.0, 0.0

    @property
    def seconds(self) -> float | None:
        return self._seconds / self._blocks if self._blocks else None

    def note(self, blocks: int, seconds: float) -> None:
        if blocks:
            self._blocks = self._blocks * _MEMORY + blocks
            self._seconds = self._seconds * _MEMORY + seconds


class LinkTime:
    """Seconds that a block takes from the device to the host, and back. Who has measured one way takes the other to
    be as fast."""

    def __init__(self, block_bytes: int) -> None:
        self._assumed = block_bytes / _ASSUMED_BANDWIDTH if block_bytes else _ASSUMED_SECONDS
        self._save, self._load = _Direction(), _Direction()
        self._doubts = self._stale = _STALE

    def note(self, report: TransferReport) -> None:
        self._save.note(report.num_saved, report.save_seconds)
        self._load.note(report.num_loaded, report.load_seconds)
        if report.num_saved:
            self._doubts = 0

    def trust(self) -> None:
        """Something was moved because of what this says: when it speaks against that again, it is soon doubted."""
        self._stale = _STALE

    def seconds(self, num_saved: int, num_loaded: int) -> float:
        """To move so many blocks away and so many back."""
        save, load = self._save.seconds, self._load.seconds
        save = save if save is not None else load if load is not None else self._assumed
        return num_saved * save + num_loaded * (save if load is None else load)

    def doubt(self) -> bool:
        """Nothing was moved because of what this says; returns whether it is time to measure that again."""
        self._doubts += 1
        if self._doubts <= self._stale:
            return False
        self._stale *= 2
        return True
