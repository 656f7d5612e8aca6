"""What a call does with the user's process: a progress line on stderr, and Ctrl-C and garbage collections that wait for
the end of a step."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self, TextIO

_REDRAW_SECONDS = 0.1  # between two drawings of a progress line
_BAR_WIDTH = 20
_NEW_OBJECTS = 25_000  # new objects that are left when young ones are collected, which takes some milliseconds
_MORE_OBJECTS = 500_000  # the same before all are collected, unless the process has more objects


class ProgressLine:
    """A progress bar with a count and a note. `shown=None` draws it only on a terminal."""

    def __init__(self, label: str, total: int, *, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._label, self._total = label, total
        self._stream = stream or sys.stderr
        self.shown = self._stream.isatty() if shown is None else shown
        self._drawn_at = float("-inf")
        self._width = 0
        self._done, self._note = 0, ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self._width:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def update(self, done: int, note: str = "") -> None:
        """Set the count and the note. Redraws at most every 0.1 s, and when `done` reaches the total."""
        if not self.shown:
            return
        self._done, self._note = done, note
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_SECONDS or done >= self._total:
            self._drawn_at = now
            self._draw()

    def _draw(self) -> None:
        filled = _BAR_WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"{self._label} [{bar}] {self._done:,}/{self._total:,}" + (f"  {self._note}" if self._note else "")
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


class LoadingProgress:
    """The progress callback of a loader, called with (what, done, total). Draws one line for each `what`."""

    def __init__(self, *, shown: bool | None = None) -> None:
        self._shown = shown
        self._what, self._line = "", ProgressLine("", 0, shown=False)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what, self._line = what, ProgressLine(what, total, shown=self._shown)
        self._line.update(done)

    def close(self) -> None:
        self._line.__exit__(None, None, None)
        self._what, self._line = "", ProgressLine("", 0, shown=False)


class DeferredInterrupt:
    """While entered, the first Ctrl-C is noted and raised by `check()`; a second one is raised at once.

    Does nothing outside the main thread, or if the program has its own SIGINT handler.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was noted."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True


class PausedCollections:
    """While paused, Python does not collect garbage by itself: `collect` does, which is called between two steps.

    A batch makes many objects and no reference cycles. Python's automatic collections would scan them repeatedly, and
    with them every object of the process: a third of a million once torch is imported.
    """

    def __init__(self) -> None:
        self._is_paused, self._num_added, self._most_added = False, 0, _MORE_OBJECTS

    def __enter__(self) -> Self:
        self.pause()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()

    def pause(self) -> None:
        """Turn automatic collections off, unless the program has done so. Idempotent."""
        if gc.isenabled():
            self._is_paused = True
            gc.disable()

    def resume(self) -> None:
        """Turn automatic collections on again if `pause` has turned them off. Idempotent."""
        if self._is_paused:
            self._is_paused = False
            gc.enable()

    def collect(self) -> None:
        """Collect garbage: among new objects if there are enough of them, among all if they may have doubled."""
        num_new = gc.get_count()[0]
        if num_new < _NEW_OBJECTS:
            return
        self._num_added += num_new
        if self._num_added < self._most_added:
            gc.collect(0)
        else:
            gc.collect()
            self._num_added, self._most_added = 0, max(_MORE_OBJECTS, len(gc.get_objects()))
