"""Merges the transfer reports of all ranks into one: a copy is complete when every rank has made it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types.transfer import NOTHING_MOVED, FailedFile, FoundFile, TransferReport


@dataclass(slots=True)
class _Tally:
    """Copies that one rank has reported, and that are not in a merged report yet."""

    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(slots=True)
class _Done:
    """Files that are done on all ranks since the last merged report."""

    stored: list[bytes] = field(default_factory=list)
    fetched: list[bytes] = field(default_factory=list)
    failed: list[FailedFile] = field(default_factory=list)
    found: list[FoundFile] = field(default_factory=list)


class TransferMerger:
    """Merges the transfer reports of ranks. A file that one rank could not write or read has failed. `orphans` are the
    keys of such files: other ranks may hold their part."""

    def __init__(self, num_ranks: int) -> None:
        self._tallies = [_Tally() for _ in range(num_ranks)]
        self._answers: dict[bytes, int] = {}  # key -> number of ranks that are done with its store or fetch
        self._failed: dict[bytes, FailedFile] = {}  # failures of these keys
        self._found: dict[bytes, list[FoundFile]] = {}
        self._last_used = float("inf")  # time of last use of the files found so far
        self._done = _Done()
        self.orphans: list[bytes] = []

    def add(self, rank: int, report: TransferReport) -> None:
        tally = self._tallies[rank]
        tally.num_saved += report.num_saved
        tally.num_loaded += report.num_loaded
        tally.save_seconds += report.save_seconds
        tally.load_seconds += report.load_seconds
        for failure in report.failed:
            self._failed.setdefault(failure.key, failure)
            self._answer(failure.key, self._done.stored)
        for key in report.stored:
            self._answer(key, self._done.stored)
        for key in report.fetched:
            self._answer(key, self._done.fetched)
        for file in report.found:
            self._add_found(file)

    def take(self) -> TransferReport:
        """Return what is complete on all ranks since the last call. Durations are those of the slowest rank."""
        tallies, done = self._tallies, self._done
        num_saved, num_loaded = (min(getattr(t, name) for t in tallies) for name in ("num_saved", "num_loaded"))
        if not (num_saved or num_loaded or done.stored or done.fetched or done.failed or done.found):
            return NOTHING_MOVED
        save_seconds = max(t.save_seconds for t in tallies) if num_saved else 0.0
        load_seconds = max(t.load_seconds for t in tallies) if num_loaded else 0.0
        for tally in tallies:
            tally.num_saved -= num_saved
            tally.num_loaded -= num_loaded
            tally.save_seconds = 0.0 if num_saved else tally.save_seconds
            tally.load_seconds = 0.0 if num_loaded else tally.load_seconds
        self._done = _Done()
        files = tuple(done.stored), tuple(done.fetched), tuple(done.failed), tuple(done.found)
        return TransferReport(*files, num_saved, num_loaded, save_seconds, load_seconds)

    def _answer(self, key: bytes, whole: list[bytes]) -> None:
        """Note that one more rank is done with a file. The engine orders one copy of a file at a time."""
        count = self._answers.pop(key, 0) + 1
        if count < len(self._tallies):
            self._answers[key] = count
        elif (failure := self._failed.pop(key, None)) is not None:
            self._done.failed.append(failure)
            self.orphans.append(key)
        else:
            whole.append(key)

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
