"""Keeps clients from filling a disk with log lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

CLIENT_LOGGERS = ("uvicorn", "asyncio", "quire.text")  # whose lines anybody can cause, as many as they like
MOST_LINES = 5  # of one kind ...
WINDOW_SECONDS = 60.0  # ... in this time
_MAX_KINDS = 256
_KEY_CHARACTERS = 100


@dataclass(slots=True)
class _Kind:
    began: float
    num_seen: int = 0


class FloodGuard(logging.Filter):
    """Lets a few lines of each kind pass in a window and leaves out the rest; the next that passes says how many.

    A kind is a logger and the text of a message before its values are put in. Only lines of `CLIENT_LOGGERS` and their
    children are counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if not any(record.name == name or record.name.startswith(f"{name}.") for name in CLIENT_LOGGERS):
            return True
        with self._lock:
            passes, note = self._judge((record.name, str(record.msg)[:_KEY_CHARACTERS]))
        if passes and note:
            record.msg, record.args = f"{record.getMessage()} ({note})", ()
        return passes

    def _judge(self, key: tuple[str, str]) -> tuple[bool, str]:
        """Whether a line of this kind passes, and what is to be added to it."""
        now = self._clock()
        kind = self._kinds.get(key)
        note = ""
        if kind is None or now - kind.began >= WINDOW_SECONDS:
            missed = 0 if kind is None else kind.num_seen - MOST_LINES
            note = f"{missed} more were left out before" if missed > 0 else ""
            if kind is None and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(now)
        kind.num_seen += 1
        if kind.num_seen == MOST_LINES:
            note = f"more of these are left out for {WINDOW_SECONDS:g} s"
        return kind.num_seen <= MOST_LINES, note
