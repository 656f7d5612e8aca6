"""The delay before the supervisor restarts a process."""

from __future__ import annotations

FIRST_DELAY = 0.5  # seconds
HEALTHY_SECONDS = 60.0  # a process that has served this long counts as healthy


class Backoff:
    """The delays between restarts of one process: 0 s after a healthy process, then 0.5 s, 1 s, 2 s and so on, at most
    `longest` seconds, until a process is healthy again."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._num_restarts = 0  # since the last healthy process

    def next_delay(self, served_seconds: float) -> float:
        """Return the seconds to wait before the next start. The previous process served for `served_seconds`."""
        if served_seconds >= HEALTHY_SECONDS:
            self._num_restarts = 0
        exponent = self._num_restarts - 1
        self._num_restarts += 1
        return 0.0 if exponent < 0 else min(self._longest, FIRST_DELAY * 2.0 ** min(exponent, 64))
