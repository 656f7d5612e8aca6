"""Ctrl-C between steps, never inside one, so that an interrupted engine stays whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """While entered, the first Ctrl-C is only noted and `check()` raises it; a second one is raised at once.

    Does nothing outside the main thread, or where the program has its own SIGINT handler.
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
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True
