"""Which rank is named when several are in trouble."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from fake_ranks import LONG, FakeLauncher
from quire.kernels.native.loader import why_not_native
from quire.runtime.executor import fault_finder as finder_module
from quire.runtime.executor import life as life_module
from quire.runtime.executor import watch as watch_module
from quire.runtime.executor.life import _NATIVE, _NATIVE_AT, PAGE_BYTES, LifePage
from quire.runtime.executor.links import Rank
from quire.runtime.executor.rank import describe_error
from quire.runtime.executor.watch import RankWatch
from quire.types.errors import ConfigError, ModelLoadError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_TICK_SECONDS", 0.002)
    monkeypatch.setattr(finder_module, "_GRACE_SECONDS", 0.002)
    monkeypatch.setattr(finder_module, "_STOPPED_SECONDS", 0.02)
    monkeypatch.setattr(watch_module, "_FAULT_SECONDS", 120.0)  # however busy the machine is


def verdict(launcher: FakeLauncher, timeout: float = LONG) -> str:
    watch = RankWatch(launcher, timeout, LONG)
    fault = watch.wait_for_fault()
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
        fake.page.write_last_message(describe_error(RuntimeError("connection closed by peer")))
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
        fake.page.write_last_message(describe_error(MemoryError(error)))
        fake.how = "exited with code 71"
    assert (
        verdict(launcher)
        == "rank 3 of 4 (stage 1, shard 1, pid 103) failed while step 5 ran: MemoryError: out of memory"
    )


def test_a_stopped_rank_is_named() -> None:
    launcher = FakeLauncher()
    launcher.fakes[1].stopped = True
    assert verdict(launcher) == "rank 1 of 4 (stage 0, shard 1, pid 101) was stopped by a signal between two steps"


def test_a_rank_without_a_heartbeat_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "_SILENT_SECONDS", 0.02)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    launcher = FakeLauncher()
    for number in (2, 3):
        launcher.fakes[number].silent = True
    _NATIVE.pack_into(launcher.fakes[3].page._memory, _NATIVE_AT, 5)  # the other's heart may wait for the interpreter
    assert verdict(launcher).startswith("rank 3 of 4 (stage 1, shard 1, pid 103) sent no heartbeat for ")


def crowd(page: LifePage, load: float) -> None:
    """Have a page say how crowded its machine is."""
    page._load_per_cpu = load
    page._write()


def test_a_rank_of_another_machine_is_not_excused_by_the_load_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "_LOCKED_SECONDS", 0.02)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    launcher = FakeLauncher()
    for number in (1, 2):
        launcher.fakes[number].silent = True
    launcher.fakes[2].is_here = False
    crowd(launcher.fakes[2].page, 0.5)
    assert verdict(launcher).startswith("rank 2 of 4 (stage 1, shard 0, pid 102) sent no heartbeat for ")


def test_a_rank_is_excused_by_the_load_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "_LOCKED_SECONDS", 0.02)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    launcher = FakeLauncher()
    for number in (1, 2):
        launcher.fakes[number].silent, launcher.fakes[number].is_here = True, False
    crowd(launcher.fakes[1].page, 1e6)
    assert verdict(launcher).startswith("rank 2 of 4")


def test_native_heartbeats_that_were_never_late_are_not_excused_by_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder_module, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    launcher = FakeLauncher()
    for number in (1, 2):
        launcher.fakes[number].silent = True
    _NATIVE.pack_into(launcher.fakes[2].page._memory, _NATIVE_AT, 5)
    assert verdict(launcher).startswith("rank 2 of 4 (stage 1, shard 0, pid 102) sent no heartbeat for ")


def test_native_heartbeats_that_were_late_before_are_excused_by_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder_module, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(finder_module, "_GAP_SECONDS", 1e-9)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    launcher, pause = FakeLauncher(), threading.Event()
    for number, load in ((1, 1e6), (2, 0.0)):
        fake = launcher.fakes[number]
        fake.is_here = False
        crowd(fake.page, load)
        _NATIVE.pack_into(fake.page._memory, _NATIVE_AT, 5)
    watch = RankWatch(launcher, LONG, LONG)
    while (finder := watch._finder) is None or not (finder._gaps[1] and finder._gaps[2]):  # beats come, and are counted
        pause.wait(0.002)
    for number in (1, 2):
        launcher.fakes[number].silent = True
    fault = watch.wait_for_fault()
    watch.stop()
    assert fault.reason.startswith("rank 2 of 4")


def sleep(page: LifePage) -> None:
    """Have a page say that its rank sleeps in a step."""
    page._asleep = 200
    page._write()


def test_a_rank_that_sleeps_in_a_step_is_named_if_others_wait_for_it() -> None:
    launcher = FakeLauncher()
    for number, fake in enumerate(launcher.fakes):
        fake.page.begin_step(9)
        if number != 2:
            fake.page.enter()
        sleep(fake.page)
    said = "rank 2 of 4 (stage 1, shard 0, pid 102) hangs while step 9 ran: it sleeps, and others wait for it"
    assert verdict(launcher) == said


def test_ranks_that_all_sleep_in_a_step_are_not_blamed() -> None:
    launcher = FakeLauncher()
    for fake in launcher.fakes:
        fake.page.begin_step(9)
        sleep(fake.page)
    watch = RankWatch(launcher, LONG, LONG)
    assert not watch._failed.wait(0.2)
    watch.stop()
    assert watch.fault is None


@pytest.mark.parametrize("why", ["", "engine", "collective", "idle", "device"])
def test_a_rank_reports_that_it_sleeps_unless_it_waits_for_others(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "_BEAT_SECONDS", 0.002)
    monkeypatch.setattr(life_module, "any_thread_runs", lambda: False)
    page, pause = LifePage(bytearray(PAGE_BYTES)), threading.Event()
    if why != "device":
        page.look_for_hangs()
    page.ready()
    if why != "idle":
        page.begin_step(9)
    page.waits_for_engine = why == "engine"
    if why == "collective":
        page.enter()
    page.start_beating()
    while page.read().beats < 10:
        pause.wait(0.01)
    assert (page.read().asleep > 3) == (not why)
    page._clock = None  # the thread goes on


def test_a_rank_reports_its_cpu_time_since_its_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, pause = iter(range(10**9)), threading.Event()
    clock = SimpleNamespace(clock_gettime=lambda _: next(seconds), pthread_getcpuclockid=lambda _: 0)
    monkeypatch.setattr(life_module, "time", clock)
    monkeypatch.setattr(life_module, "_BEAT_SECONDS", 0.002)
    page = LifePage(bytearray(PAGE_BYTES))
    page.look_for_hangs()
    page.ready()
    page.begin_step(9)
    page.start_beating()
    while page.read().computed < 3.0:
        pause.wait(0.01)
    page.enter()
    beats = page.read().beats
    while page.read().beats < beats + 3:  # the first of them may have begun before
        pause.wait(0.01)
    assert page.read().computed == 0.0
    page._clock = None  # the thread goes on


def test_disk_reads_count_as_progress_while_a_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, pause = iter(range(10**9)), threading.Event()
    monkeypatch.setattr(life_module, "num_reads", lambda: next(reads))
    monkeypatch.setattr(life_module, "_BEAT_SECONDS", 0.002)
    page = LifePage(bytearray(PAGE_BYTES))
    page.start_beating()
    while page.read().loaded < 3:
        pause.wait(0.01)
    page.ready()
    seen = []
    for _ in range(2):
        beats = page.read().beats
        while page.read().beats < beats + 3:  # the first of them may have begun before
            pause.wait(0.01)
        seen.append(page.read().loaded)
    assert seen[0] == seen[1]


def test_a_thread_that_computes_is_seen_and_one_that_sleeps_is_not() -> None:
    program = """
import threading
from quire.runtime.executor.life import any_thread_runs
over, pause = threading.Event(), threading.Event()
def count():
    while not over.is_set():
        pass
sleeper, worker = threading.Thread(target=pause.wait, daemon=True), threading.Thread(target=count)
sleeper.start()
print(all(any_thread_runs() for _ in range(1000)))
worker.start()
print(any(any_thread_runs() for _ in range(1000)))
over.set()
worker.join()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE).stdout
    assert said.split() == [b"False", b"True"]


def test_a_heartbeat_carries_the_load_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * (os.cpu_count() or 1), 0.0, 0.0))
    page, pause = LifePage(bytearray(PAGE_BYTES)), threading.Event()
    page.start_beating()
    while not page.read().beats:
        pause.wait(0.01)
    assert page.read().load_per_cpu == 3.0
    copy = LifePage(bytearray(PAGE_BYTES))
    copy.put_bytes(page.copy_bytes())
    assert copy.read().load_per_cpu == 3.0


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


def test_a_rank_that_another_waits_for_in_a_compiled_program_is_named() -> None:
    launcher = FakeLauncher()
    for number, meetings in ((0, 31), (1, 30), (2, 31), (3, 31)):
        page = launcher.fakes[number].page
        page.begin_step(9)
        page.count_meetings(lambda meetings=meetings: meetings)
        page._write()
    said = verdict(launcher, timeout=0.05)
    assert said.startswith("rank 1 of 4 (stage 0, shard 1, pid 101) made no progress for ")


def test_the_rank_that_does_not_wait_is_named_even_if_it_is_ahead() -> None:
    launcher = FakeLauncher()
    for number in (0, 1, 2):
        page = launcher.fakes[number].page
        page.begin_step(9)
        page.enter()
    page = launcher.fakes[3].page
    page.begin_step(9)
    page.enter()
    page.leave()
    assert verdict(launcher, timeout=0.05).startswith("rank 3 of 4 (stage 1, shard 1, pid 103) made no progress for ")


def test_all_ranks_are_killed_even_if_killing_one_fails() -> None:
    def fail() -> None:
        raise OSError("no such node")

    launcher = FakeLauncher()
    launcher.fakes[0].on_kill, launcher.fakes[2].stopped = fail, True
    assert verdict(launcher).startswith("rank 2 of 4")


def test_the_fault_is_reported_before_all_ranks_have_ended() -> None:
    goes_on = threading.Event()
    launcher = FakeLauncher()
    launcher.fakes[0].on_kill, launcher.fakes[2].stopped = lambda: goes_on.wait(60), True
    watch = RankWatch(launcher, LONG, LONG)
    assert watch.wait_for_fault().reason.startswith("rank 2 of 4")
    assert not launcher.fakes[3].killed
    goes_on.set()
    watch.stop()


def test_ranks_that_cannot_be_watched_are_killed() -> None:
    def fail() -> bool:
        raise PermissionError("/proc")

    launcher = FakeLauncher()
    launcher.fakes[1].is_stopped = fail  # type: ignore[method-assign]
    assert verdict(launcher) == "the ranks could not be watched any more: PermissionError('/proc')"


@pytest.mark.skipif(
    why_not_native(torch.float32, torch.device("cpu")) is not None, reason="the native CPU kernels were not built"
)
def test_native_heartbeats_continue_while_a_thread_holds_the_gil() -> None:
    program = """
import ctypes
from quire.runtime.executor.channel import channel_pair
from quire.runtime.executor.life import PAGE_BYTES, LifePage
page, (ours, theirs) = LifePage(bytearray(PAGE_BYTES)), channel_pair()
page.start_native_beats(theirs.fileno(), 0.001)
ctypes.PyDLL(None).sleep(1)  # a call that keeps the lock
print(page.read().native, ours.discard(), flush=True)
del page, theirs  # which the interpreter may do at its end
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE).stdout
    counted, sent = map(int, said.split())
    assert counted > 3
    assert sent > 3


def test_a_long_step_in_which_no_rank_waits_is_not_a_fault() -> None:
    launcher = FakeLauncher()
    for fake in launcher.fakes:
        fake.page.begin_step(9)
    watch = RankWatch(launcher, 0.01, LONG)
    assert not watch._failed.wait(0.2)
    watch.stop()
    assert watch.fault is None


@pytest.mark.parametrize(
    "error",
    [ConfigError("dtype", "is wrong", "use another"), ModelLoadError("file", "is broken", tensor="t", fix="fetch it")],
)
def test_an_error_that_a_user_can_fix_keeps_its_type(error: Exception) -> None:
    launcher = FakeLauncher()
    launcher.fakes[0].page.write_last_message(describe_error(error))
    launcher.fakes[0].how = "exited with code 71"
    watch = RankWatch(launcher, LONG, LONG)
    found = watch.wait_for_fault().error
    watch.stop()
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_what_starting_raises_reaches_the_caller() -> None:
    class Broken(FakeLauncher):
        def start(self) -> Sequence[Rank]:
            raise OSError("no processes left")

    watch = RankWatch(Broken(), LONG, LONG)
    with pytest.raises(OSError, match="no processes left"):
        watch.ranks()
    watch.stop()
