"""Merges the transfer reports of all ranks into one: a copy is complete when every rank has made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.types.transfer import NOTHING_MOVED, FailedFile, FoundFile, LookupResult, TransferReport


@dataclass(slots=True)
class _Tally:
    """Copies that one rank has reported, and that are not in a merged report yet."""

    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0


class _Parts:
    """Copies of keys, of which every rank makes its part. A copy that one rank could not make has failed. The engine
    orders one copy of a key at a time."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_ended: dict[bytes, int] = {}  # key -> number of ranks that have ended its copy
        self._failures: dict[bytes, FailedFile] = {}  # the first failure of each of these keys
        self.failed: list[FailedFile] = []  # copies that have failed and that all ranks have ended

    def add(self, keys: Sequence[bytes], whole: list[bytes]) -> None:
        """Note that a rank has ended these copies. Appends those that all ranks have made to `whole`."""
        for key in keys:
            count = self._num_ended.pop(key, 0) + 1
            if count < self._num_ranks:
                self._num_ended[key] = count
            elif (failure := self._failures.pop(key, None)) is not None:
                self.failed.append(failure)
            else:
                whole.append(key)

    def add_failed(self, failures: Sequence[FailedFile]) -> None:
        for failure in failures:
            self._failures.setdefault(failure.key, failure)
        self.add([failure.key for failure in failures], [])

    def take_failed(self) -> tuple[FailedFile, ...]:
        failed, self.failed = tuple(self.failed), []
        return failed


@dataclass(slots=True)
class _Done:
    """What is done on all ranks since the last merged report."""

    stored: list[bytes] = field(default_factory=list)
    fetched: list[bytes] = field(default_factory=list)
    found: list[FoundFile] = field(default_factory=list)
    put: list[bytes] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    looked_up: list[LookupResult] = field(default_factory=list)


class TransferMerger:
    """Merges the transfer reports of ranks. A file that one rank could not write or read has failed. `orphans` are the
    keys of such files: other ranks may hold their part."""

    def __init__(self, num_ranks: int) -> None:
        self._tallies = [_Tally() for _ in range(num_ranks)]
        self._files, self._carried = _Parts(num_ranks), _Parts(num_ranks)
        self._found: dict[bytes, list[FoundFile]] = {}
        self._looked_up: dict[int, list[LookupResult]] = {}  # by number of the lookup
        self._last_used = float("inf")  # time of last use of the files found so far
        self._done = _Done()
        self.orphans: list[bytes] = []

    def add(self, rank: int, report: TransferReport) -> None:
        tally, done = self._tallies[rank], self._done
        tally.num_saved += report.num_saved
        tally.num_loaded += report.num_loaded
        tally.save_seconds += report.save_seconds
        tally.load_seconds += report.load_seconds
        self._files.add_failed(report.failed)
        self._files.add(report.stored, done.stored)
        self._files.add(report.fetched, done.fetched)
        self._carried.add_failed(report.lost)
        self._carried.add(report.put, done.put)
        self._carried.add(report.got, done.got)
        for file in report.found:
            self._add_found(file)
        for result in report.looked_up:
            self._add_looked_up(result)

    def take(self) -> TransferReport:
        """Return what is complete on all ranks since the last call. Durations are those of the slowest rank."""
        tallies, done, self._done = self._tallies, self._done, _Done()
        num_saved, num_loaded = (min(getattr(t, name) for t in tallies) for name in ("num_saved", "num_loaded"))
        save_seconds = max(t.save_seconds for t in tallies) if num_saved else 0.0
        load_seconds = max(t.load_seconds for t in tallies) if num_loaded else 0.0
        for tally in tallies:
            tally.num_saved -= num_saved
            tally.num_loaded -= num_loaded
            tally.save_seconds = 0.0 if num_saved else tally.save_seconds
            tally.load_seconds = 0.0 if num_loaded else tally.load_seconds
        failed = self._files.take_failed()
        self.orphans += [failure.key for failure in failed]
        report = TransferReport(
            tuple(done.stored), tuple(done.fetched), failed, tuple(done.found),
            num_saved, num_loaded, save_seconds, load_seconds,
            tuple(done.put), tuple(done.got), self._carried.take_failed(), tuple(done.looked_up),
        )  # fmt: skip
        return NOTHING_MOVED if report == NOTHING_MOVED else report

    def _add_found(self, file: FoundFile) -> None:
        """Note a file that a rank has found on disk. It counts when every rank has found its part. Reported times of
        last use never increase."""
        parts = self._found.setdefault(file.key, [])
        parts.append(file)
        if len(parts) == len(self._tallies):
            del self._found[file.key]
            self._last_used = min(self._last_used, *(part.used_at for part in parts))
            self._done.found.append(
                FoundFile(file.key, self._last_used, max(part.num_blocks for part in parts))
            )  # fmt: skip

    def _add_looked_up(self, result: LookupResult) -> None:
        """Note a rank's answer to a lookup. A block is found if every rank has found its part."""
        parts = self._looked_up.setdefault(result.number, [])
        parts.append(result)
        if len(parts) == len(self._tallies):
            del self._looked_up[result.number]
            everywhere = set(result.found).intersection(*(part.found for part in parts))
            found = tuple(key for key in result.found if key in everywhere)
            failure = next((part.failure for part in parts if part.failure), "")
            self._done.looked_up.append(LookupResult(result.number, found, failure))
