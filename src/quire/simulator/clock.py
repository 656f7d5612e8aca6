"""The clocks of simulated and replayed engines."""

from __future__ import annotations


class VirtualClock:
    """A clock that only moves when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move_to(self, moment: float) -> None:
        """Move the clock forward. An earlier moment changes nothing."""
        self.now = max(self.now, moment)


class RecordedClock:
    """Returns the recorded readings of another clock, one per call. After the last one it repeats it, and counts the
    calls that had no reading."""

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
        """Replace the readings and reset the count."""
        self._readings, self.num_missing = list(reversed(readings)), 0

    @property
    def num_left(self) -> int:
        return len(self._readings)
