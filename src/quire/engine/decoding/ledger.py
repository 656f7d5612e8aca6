"""What happened to a request, written down while it lives."""

from __future__ import annotations

from quire.types.ledger import LedgerEntry, LedgerKind, PrefixMiss

MAX_ENTRIES = 64
_MERGE_FROM = 32  # from here on chunks that follow each other share one entry


class Ledger:
    """At most MAX_ENTRIES entries. The last is always the end; what did not fit before it is counted in its note."""

    __slots__ = ("_entries", "_left_out")

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._left_out = 0

    def note(
        self, kind: LedgerKind, at: float, amount: int = 0, note: str = "", miss: PrefixMiss | None = None
    ) -> None:
        entries = self._entries
        if len(entries) < _MERGE_FROM:
            entries.append(LedgerEntry(kind, at, amount, note, miss))
        elif kind == "chunk" and entries[-1].kind == "chunk":
            last = entries[-1]
            entries[-1] = LedgerEntry(kind, last.at, last.amount + amount, "several chunks")
        elif len(entries) < MAX_ENTRIES - 1:
            entries.append(LedgerEntry(kind, at, amount, note, miss))
        else:
            self._left_out += 1

    def note_miss(self, at: float, miss: PrefixMiss) -> None:
        """The prefix cache ended, and why."""
        self.note("missed", at, miss.num_found + 1, miss.text(), miss)

    def finish(self, at: float, amount: int, note: str) -> tuple[LedgerEntry, ...]:
        """All entries, with the end as the last."""
        if self._left_out:
            note = f"{note}; {self._left_out} entries were left out"
        return (*self._entries, LedgerEntry("finished", at, amount, note))
