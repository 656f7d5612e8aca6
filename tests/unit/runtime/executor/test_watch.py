"""Which rank is named when several are in trouble."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.config.parallel import ParallelConfig, RankPlace
from quire.runtime.executor import watch as watch_module
from quire.runtime.executor.channel import Channel
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.links import Rank
from quire.runtime.executor.rank import describe_error
from quire.runtime.executor.watch import RankWatch
from quire.types.errors import ConfigError, ModelLoadError

CONFIG = ParallelConfig(2, 2, executor="processes")


class FakeRank:
    """Implements Rank. Its page beats at every look, unless it is silent."""

    control: Channel
    calls: Channel
    device_index = None

    def __init__(self, number: int) -> None:
        self.place: RankPlace = CONFIG.place(number)
        self.name = f"pid {100 + number}"
        self.page = LifePage(bytearray(PAGE_BYTES))
        self.how: str | None = None
        self.stopped = self.silent = self.killed = False

    def ending(self) -> str | None:
        return self.how

    def is_stopped(self) -> bool:
        if not self.silent:
            self.page._beats += 1
            self.page._write()
        return self.stopped

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        """There is nothing to close."""


class FakeLauncher:
    """Implements RankLauncher."""

    def __init__(self) -> None:
        self.fakes = [FakeRank(number) for number in range(CONFIG.num_ranks)]
        for fake in self.fakes:
            fake.page.idle()

    def start(self) -> Sequence[Rank]:
        return self.fakes

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_TICK_SECONDS", 0.002)
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.002)
    monkeypatch.setattr(watch_module, "_STOPPED_SECONDS", 0.02)


def verdict(launcher: FakeLauncher, timeout: float = 1_000.0) -> str:
    watch = RankWatch(launcher, timeout)
    fault = watch.verdict()
    watch.stop()
    assert watch.fault is fault
    assert all(fake.killed for fake in launcher.fakes)
    return fault.reason


def test_a_rank_that_was_killed_is_named_and_not_those_that_could_not_reach_it() -> None:
    launcher = FakeLauncher()
    for number in (0, 1, 3):
        fake = launcher.fakes[number]
        fake.page.begin_step(812)
        fake.page.enter()
        fake.page.say(describe_error(RuntimeError("connection closed by peer")))
        fake.how = "exited with code 71"
    launcher.fakes[2].page.begin_step(812)
    launcher.fakes[2].how = "was killed by signal 9"
    said = "rank 2 of 4 (stage 1, shard 0, pid 102) was killed by signal 9 while step 812 ran"
    assert verdict(launcher) == said


def test_an_error_outside_a_collective_counts_before_one_inside() -> None:
    launcher = FakeLauncher()
    for number, error in ((0, "no peer"), (3, "out of memory")):
        fake = launcher.fakes[number]
        fake.page.begin_step(5)
        if number == 0:
            fake.page.enter()
        fake.page.say(describe_error(MemoryError(error)))
        fake.how = "exited with code 71"
    assert (
        verdict(launcher)
        == "rank 3 of 4 (stage 1, shard 1, pid 103) failed while step 5 ran: MemoryError: out of memory"
    )


def test_a_halted_rank_is_named() -> None:
    launcher = FakeLauncher()
    launcher.fakes[1].stopped = True
    assert verdict(launcher) == "rank 1 of 4 (stage 0, shard 1, pid 101) was halted by a signal between two steps"


def test_a_rank_without_a_heartbeat_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_SECONDS", 0.02)
    monkeypatch.setattr(watch_module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    launcher = FakeLauncher()
    launcher.fakes[3].silent = True
    for fake in launcher.fakes[:3]:
        fake.silent = False
    assert verdict(launcher).startswith("rank 3 of 4 (stage 1, shard 1, pid 103) gave no sign of life for ")


def test_the_rank_that_is_behind_is_named_among_those_that_wait() -> None:
    launcher = FakeLauncher()
    for number, count in ((0, 7), (1, 7), (2, 6), (3, 7)):
        page = launcher.fakes[number].page
        page.begin_step(9)
        for _ in range(count - 1):
            page.enter()
            page.leave()
        if number != 2:
            page.enter()
    said = verdict(launcher, timeout=0.05)
    assert said.startswith("rank 2 of 4 (stage 1, shard 0, pid 102) made no progress for ")
    assert said.endswith("while step 9 ran, and others wait for it")


def test_a_long_step_in_which_nobody_waits_is_left_alone() -> None:
    launcher = FakeLauncher()
    for fake in launcher.fakes:
        fake.page.begin_step(9)
    watch = RankWatch(launcher, 0.01)
    assert not watch._over.wait(0.2)
    watch.stop()
    assert watch.fault is None


@pytest.mark.parametrize(
    "error",
    [ConfigError("dtype", "is wrong", "use another"), ModelLoadError("file", "is broken", tensor="t", fix="fetch it")],
)
def test_an_error_that_a_user_can_mend_keeps_its_type(error: Exception) -> None:
    launcher = FakeLauncher()
    launcher.fakes[0].page.say(describe_error(error))
    launcher.fakes[0].how = "exited with code 71"
    watch = RankWatch(launcher, 1.0)
    found = watch.verdict().error
    watch.stop()
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_what_starting_raises_reaches_the_caller() -> None:
    class Broken(FakeLauncher):
        def start(self) -> Sequence[Rank]:
            raise OSError("no processes left")

    watch = RankWatch(Broken(), 1.0)
    with pytest.raises(OSError, match="no processes left"):
        watch.ranks()
    watch.stop()
