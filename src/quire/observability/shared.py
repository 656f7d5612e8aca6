"""One file of counts per edge in the server's private directory, so that any edge can show them all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.observability.tally import Tally

_PATTERN = "counts-*.json"


class SharedCounts:
    """This edge's file, and the reading of the others'. Files are replaced whole: a reader never sees half of one."""

    def __init__(self, directory: Path, edge: int) -> None:
        self._directory, self._own = directory, directory / f"counts-{edge}.json"

    def encode(self, tally: Tally) -> str:
        """The text of this edge's file."""
        return json.dumps({"pid": os.getpid(), **tally.snapshot()})

    def write(self, text: str) -> None:
        """Replace this edge's file."""
        draft = self._own.with_suffix(".draft")
        draft.write_text(text, encoding="ascii")
        draft.replace(self._own)

    def add_others(self, tally: Tally) -> None:
        """Add the counts of all other edges; of edges that ended, not what is now."""
        for path in self._directory.glob(_PATTERN):
            if path != self._own:
                for snapshot in _read(path):
                    tally.absorb(snapshot, gauges=_is_alive(snapshot["pid"]))

    def inherit(self, tally: Tally) -> None:
        """Take over the counts of edges that ended and remove their files. Of several heirs one gets each file."""
        for path in self._directory.glob(_PATTERN):
            if path == self._own or any(_is_alive(snapshot["pid"]) for snapshot in _read(path)):
                continue
            taken = self._own.with_suffix(".taken")
            try:
                path.replace(taken)
            except FileNotFoundError:
                continue
            for snapshot in _read(taken):
                tally.absorb(snapshot, gauges=False)
            taken.unlink()


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The file's counts, or nothing if it was taken away meanwhile."""
    try:
        yield json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
