"""Clocks for simulated and replayed engines."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only by `move_to`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move_to(self, moment: float) -> None:
        """Move the clock forward to `moment`. An earlier moment changes nothing."""
        self.now = max(self.now, moment)


class RecordedClock:
    """Returns the recorded readings of another clock, one per call. After the last reading it repeats that reading and
    counts such calls in `num_missing`."""

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

    def set_readings(self, readings: tuple[float, ...]) -> None:
        """Replace the readings and reset `num_missing`."""
        self._readings, self.num_missing = list(reversed(readings)), 0

    @property
    def num_left(self) -> int:
        return len(self._readings)
