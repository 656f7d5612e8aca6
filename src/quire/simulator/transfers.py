"""Simulated transfers between the tiers: each takes the seconds of its cost and copies no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.simulator.clock import VirtualClock
from quire.types.transfer import NO_TRANSFERS, NOTHING_MOVED, FoundFile, TransferReport, Transfers


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds per block: from the device to host memory, from host memory to the device, and to or from a file."""

    save: float
    load: float
    file: float


DEFAULT_TRANSFER_COST = TransferCost(save=1e-4, load=1e-4, file=1e-3)  # about 2 MiB a block at 20 GiB/s and 2 GiB/s


class _Pending(NamedTuple):
    end: float
    report: TransferReport


class SimulatedTransfers:
    """Simulates the link between device and host, and the disk. Each runs one transfer at a time, and none fails.
    `files` are on the disk at the start."""

    def __init__(self, clock: VirtualClock, cost: TransferCost, files: tuple[FoundFile, ...] = ()) -> None:
        self._clock, self._cost = clock, cost
        self._link_free_at = self._disk_free_at = 0.0
        self._pending: deque[_Pending] = deque()
        if files:
            self._pending.append(_Pending(clock.now, TransferReport(found=files)))

    def submit(self, transfers: Transfers) -> None:
        if transfers is NO_TRANSFERS:
            return
        saving, loading = len(transfers.saves) * self._cost.save, len(transfers.loads) * self._cost.load
        self._link_free_at = max(self._clock.now, self._link_free_at) + saving + loading
        copied = TransferReport(
            num_saved=len(transfers.saves),
            num_loaded=len(transfers.loads),
            save_seconds=saving,
            load_seconds=loading,
        )
        self._pending.append(_Pending(self._link_free_at, copied))
        for move in transfers.stores:
            self._copy_file(TransferReport(stored=(move.key,)))
        for move in transfers.fetches:
            self._copy_file(TransferReport(fetched=(move.key,)))

    def report(self) -> TransferReport:
        done = [each.report for each in self._pending if each.end <= self._clock.now]
        if not done:
            return NOTHING_MOVED
        self._pending = deque(each for each in self._pending if each.end > self._clock.now)
        return TransferReport(
            stored=tuple(key for report in done for key in report.stored),
            fetched=tuple(key for report in done for key in report.fetched),
            found=tuple(file for report in done for file in report.found),
            num_saved=sum(report.num_saved for report in done),
            num_loaded=sum(report.num_loaded for report in done),
            save_seconds=sum(report.save_seconds for report in done),
            load_seconds=sum(report.load_seconds for report in done),
        )

    def next_completion(self) -> float | None:
        """Return the moment at which the next transfer completes; None: no transfer is pending."""
        return min((each.end for each in self._pending), default=None)

    def _copy_file(self, report: TransferReport) -> None:
        self._disk_free_at = max(self._clock.now, self._disk_free_at) + self._cost.file
        self._pending.append(_Pending(self._disk_free_at, report))


def fit_transfer_cost(reports: Iterable[TransferReport]) -> TransferCost:
    """Return the mean seconds per block in the reports, or the default where no block was copied."""
    saved = loaded = 0
    saving = loading = 0.0
    for report in reports:
        saved, loaded = saved + report.num_saved, loaded + report.num_loaded
        saving, loading = saving + report.save_seconds, loading + report.load_seconds
    save = saving / saved if saved else DEFAULT_TRANSFER_COST.save
    return TransferCost(save, loading / loaded if loaded else DEFAULT_TRANSFER_COST.load, DEFAULT_TRANSFER_COST.file)
