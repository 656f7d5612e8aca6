"""Transfers between tiers without bytes: each takes as long as it costs, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.simulator.clock import VirtualClock
from quire.types.transfer import NO_TRANSFERS, NOTHING_MOVED, FoundFile, TransferReport, Transfers


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds for a block: from the device to host memory, back, and to or from a file."""

    save: float
    load: float
    file: float


DEFAULT_LINK = LinkCost(save=1e-4, load=1e-4, file=1e-3)  # about 2 MiB a block at 20 GiB/s and 2 GiB/s


class _Carried(NamedTuple):
    done: float
    report: TransferReport


class SimulatedLink:
    """A link and a disk, each busy with one thing at a time. Nothing fails. `files` are on the disk at the start."""

    def __init__(self, clock: VirtualClock, cost: LinkCost, files: tuple[FoundFile, ...] = ()) -> None:
        self._clock, self._cost = clock, cost
        self._link_free_at = self._disk_free_at = 0.0
        self._under_way: deque[_Carried] = deque()
        if files:
            self._under_way.append(_Carried(clock.now, TransferReport(found=files)))

    def carry(self, orders: Transfers) -> None:
        if orders is NO_TRANSFERS:
            return
        saving, loading = len(orders.saves) * self._cost.save, len(orders.loads) * self._cost.load
        self._link_free_at = max(self._clock.now, self._link_free_at) + saving + loading
        moved = TransferReport(
            num_saved=len(orders.saves), num_loaded=len(orders.loads), save_seconds=saving, load_seconds=loading
        )
        self._under_way.append(_Carried(self._link_free_at, moved))
        for move in orders.stores:
            self._file(TransferReport(stored=(move.key,)))
        for move in orders.fetches:
            self._file(TransferReport(fetched=(move.key,)))

    def report(self) -> TransferReport:
        done = [each.report for each in self._under_way if each.done <= self._clock.now]
        if not done:
            return NOTHING_MOVED
        self._under_way = deque(each for each in self._under_way if each.done > self._clock.now)
        return TransferReport(
            stored=tuple(key for report in done for key in report.stored),
            fetched=tuple(key for report in done for key in report.fetched),
            found=tuple(file for report in done for file in report.found),
            num_saved=sum(report.num_saved for report in done),
            num_loaded=sum(report.num_loaded for report in done),
            save_seconds=sum(report.save_seconds for report in done),
            load_seconds=sum(report.load_seconds for report in done),
        )

    def next_done(self) -> float | None:
        """When there will be more to report."""
        return min((each.done for each in self._under_way), default=None)

    def _file(self, report: TransferReport) -> None:
        self._disk_free_at = max(self._clock.now, self._disk_free_at) + self._cost.file
        self._under_way.append(_Carried(self._disk_free_at, report))


def fit_link(reports: Iterable[TransferReport]) -> LinkCost:
    """What a block took on average, as far as any were moved."""
    saved = loaded = 0
    saving = loading = 0.0
    for report in reports:
        saved, loaded = saved + report.num_saved, loaded + report.num_loaded
        saving, loading = saving + report.save_seconds, loading + report.load_seconds
    save = saving / saved if saved else DEFAULT_LINK.save
    return LinkCost(save, loading / loaded if loaded else DEFAULT_LINK.load, DEFAULT_LINK.file)
