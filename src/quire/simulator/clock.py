"""Clocks that do not run by themselves."""

from __future__ import annotations


class VirtualClock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move_to(self, moment: float) -> None:
        """Never back."""
        self.now = max(self.now, moment)


class RecordedClock:
    """Says what another clock said, reading by reading. Read more often, it says the last again and counts that."""

    def __init__(self) -> None:
        self._readings: list[float] = []
        self._last = 0.0
        self.num_missing = 0

    def __call__(self) -> float:
        if self._readings:
            self._last = self._readings.pop()
        else:
            self.num_missing += 1
        return self._last

    def feed(self, readings: tuple[float, ...]) -> None:
        self._readings, self.num_missing = list(reversed(readings)), 0

    @property
    def num_left(self) -> int:
        return len(self._readings)
