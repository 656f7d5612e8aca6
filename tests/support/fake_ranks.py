"""Ranks that are no processes: a test says what they show of themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.config.parallel import ParallelConfig, RankPlace
from quire.runtime.executor.channel import Channel
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.links import Rank

CONFIG = ParallelConfig(2, 2, executor="processes")
LONG = 1_000.0  # seconds


class FakeRank:
    """Implements Rank. Its page beats at every look, unless it is silent."""

    control: Channel
    calls: Channel
    device_index = None

    def __init__(self, number: int, config: ParallelConfig = CONFIG) -> None:
        self.place: RankPlace = config.place(number)
        self.name = f"pid {100 + number}"
        self.page = LifePage(bytearray(PAGE_BYTES))
        self.how: str | None = None
        self.stopped = self.silent = self.killed = False
        self.is_here = True
        self.on_kill: Callable[[], object] = bool
        self._num_beats = 0

    def ending(self) -> str | None:
        return self.how

    def num_beats(self) -> int:
        self._num_beats += not self.silent
        return self._num_beats

    def is_stopped(self) -> bool:
        return self.stopped

    def kill(self) -> None:
        self.killed = True
        self.on_kill()

    def close(self) -> None:
        """There is nothing to close."""


class FakeLauncher:
    """Implements RankLauncher."""

    rings = None

    def __init__(self) -> None:
        self.fakes = [FakeRank(number) for number in range(CONFIG.num_ranks)]
        for fake in self.fakes:
            fake.page.ready()

    def start(self) -> Sequence[Rank]:
        return self.fakes

    def close(self) -> None:
        """There is nothing to close."""
