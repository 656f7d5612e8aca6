"""The executor over several processes: the same answers as one process."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapter_files import SMALL, make_adapter
from faulty_rank_main import HANGS, LOOPS, LOOPS_INSIDE, RAISES, SLEEPS, SLEEPS_INSIDE
from quire.config.tiers import TierConfig
from quire.engine.core import EngineCore
from quire.kernels.native.loader import why_not_native
from quire.runtime.executor import ranked as ranked_module
from quire.runtime.executor import watch as watch_module
from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.codec import encode
from quire.runtime.executor.fault_finder import Fault, FaultFinder
from quire.runtime.executor.life import BUSY, IDLE, PAGE_BYTES, LifePage
from quire.runtime.executor.links import ProcessLauncher
from quire.runtime.executor.rank import RankServer
from quire.runtime.executor.ranked import RankedExecutor, RankJob
from quire.runtime.loading.files import ModelFiles
from quire.types.adapters import AdapterPlacement
from quire.types.errors import EngineDead, InvalidRequest, ModelLoadError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, NewRow, StepPlan, StepResult
from ranked_engines import (
    FILES,
    MODEL,
    config_of,
    decode_step,
    first_step,
    leaving_nothing,
    make_ranked,
    make_single,
    new_row,
    pids,
)
from real_server import is_alive
from tiny_models import DEVICE, VOCAB, engine_config, transformers_model

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks of a GPU have a device each")
needs_program = pytest.mark.skipif(
    why_not_native(torch.float32, torch.device("cpu")) is not None, reason="no compiled program in which a rank hangs"
)
CONFIG = replace(engine_config(block_size=16, rows=4), adapters=SMALL)


@pytest.fixture(scope="module")
def ranked() -> Iterator[RankedExecutor]:
    with leaving_nothing() as started:
        executor = make_ranked(config_of(CONFIG))
        started += pids(executor)
        yield executor
        executor.check()
        executor.close()
        executor.close()
        with pytest.raises(EngineDead, match="closed"):
            executor.launch(StepPlan(0))


def test_two_ranks_give_the_outputs_of_one(ranked: RankedExecutor) -> None:
    answers = []
    for executor in (make_single(CONFIG), ranked):
        core = EngineCore(executor, CONFIG.cache, CONFIG.scheduler, VOCAB)
        for number in range(6):
            sampling = SamplingParams(temperature=number % 2, max_tokens=9, logprobs=2, n=1 + number % 2)
            core.submit(Submit(f"r{number}", tuple(range(1, 4 + 5 * number)), sampling, TokenRules()))
        found = {}
        while core.has_work:
            found |= {end.request_id: end for end in core.step().finished}
        core.check()
        answers.append({name: [list(one.token_ids) for one in end.samples] for name, end in found.items()})
        assert not any(end.error for end in found.values())
    assert answers[0] == answers[1]


def test_each_rank_reports_its_memory(ranked: RankedExecutor) -> None:
    whole, cache = make_single(CONFIG).num_bytes
    assert set(ranked.num_bytes) == {0, 1}
    for weights, own_cache in ranked.num_bytes.values():
        assert 0.45 * whole < weights < 0.55 * whole  # without the memory in which ranks sum; panels are padded
        assert 2 * own_cache == cache


def test_a_guided_step_waits_for_its_masks(ranked: RankedExecutor) -> None:
    ranked.launch(first_step(0, new_row(0, 5)))
    ranked.collect()
    ranked.launch(replace(decode_step(1, 0), guided=True))
    with pytest.raises(RuntimeError, match="waits for its masks"):
        ranked.collect()
    bits = np.zeros((1, -(-VOCAB // 32)), dtype=np.uint32)
    bits[0, 1] = 1 << 9
    ranked.supply_masks(Masks(np.zeros(1, dtype=np.int32), bits))
    assert ranked.collect().token_ids.tolist() == [41]
    ranked.launch(StepPlan(2, released=(0,)))
    assert ranked.collect().step == 2


def test_adapters_are_read_by_every_rank(ranked: RankedExecutor, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        ranked.read_adapter("none", str(tmp_path / "nowhere"))
    folder = str(make_adapter(tmp_path, transformers_model(MODEL)))
    info = ranked.read_adapter("mine", folder)
    assert (info.name, info.rank) == ("mine", 4)
    single, results = make_single(CONFIG), []
    whole = single.read_adapter("mine", folder)
    assert replace(whole, num_bytes=info.num_bytes) == info
    assert info.num_bytes < whole.num_bytes, "a rank has its part of the matrices"
    row = new_row(0, 5, logprobs=0)._replace(adapter=1)
    for executor in (single, ranked):
        executor.launch(replace(first_step(0, row), adapters=(AdapterPlacement(1, info.digest),)))
        result = executor.collect()
        assert not result.failures
        results.append((result.token_ids.tolist(), result.logprobs[0].entry.logprobs.tolist()))
        executor.launch(StepPlan(1, released=(0,)))
        executor.collect()
        executor.forget_adapter(info.digest)
    (tokens, logprobs), (ranked_tokens, ranked_logprobs) = results
    assert ranked_tokens == tokens
    assert ranked_logprobs == pytest.approx(logprobs, rel=1e-5)


@pytest.mark.usefixtures("patient")
def test_blocks_move_through_the_tiers_of_all_ranks(tmp_path: Path) -> None:
    """Prompts that the device cannot hold are found in host memory or on disk, where every rank has its part."""
    tiers = TierConfig(6, str(tmp_path), 64, "through", block_bytes=1 << 12)
    config = config_of(engine_config(block_size=4, num_blocks=12, rows=4, tiers=tiers))
    prompts = [tuple(range(begin, begin + 30)) for begin in (1, 31, 61)]
    executor, answers = make_ranked(config), []
    core = EngineCore(executor, config.cache, config.scheduler, VOCAB)
    for number, prompt in enumerate(2 * prompts):
        core.submit(Submit(f"r{number}", prompt, SamplingParams(temperature=0.0, max_tokens=4), TokenRules()))
        while core.has_work:
            answers += [(end.error, end.samples[0].token_ids) for end in core.step().finished]
    stats = core.stats()
    executor.check()
    core.close()
    assert answers[:3] == answers[3:]
    assert not any(error for error, _ in answers)
    assert stats.tiers.stored
    assert stats.tiers.fetched
    assert stats.tiers.failures.keys() <= {"queue", "host_full", "slow"}  # copies that were not made in time
    assert stats.disk_hits
    parts = [sorted(path.name for path in folder.iterdir()) for folder in sorted(tmp_path.iterdir())]
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["rank-0-of-2x1", "rank-1-of-2x1"]
    assert parts[0] == parts[1]


def test_an_error_while_loading_arrives_unchanged(tmp_path: Path) -> None:
    config = config_of()
    with leaving_nothing() as started:
        launcher, start = ProcessLauncher(config.parallel, None), ProcessLauncher.start

        def noted(self: ProcessLauncher) -> object:
            ranks = start(self)
            started.extend(rank.process.pid for rank in ranks)  # type: ignore[attr-defined]
            return ranks

        launcher.start = noted.__get__(launcher)  # type: ignore[attr-defined, method-assign]
        with pytest.raises(ModelLoadError, match="nowhere"):
            RankedExecutor(RankJob(ModelFiles("tiny", tmp_path / "nowhere", "hf"), MODEL, config), launcher)


def launch_and_wait(executor: RankedExecutor, step: int) -> str:
    """Run steps from `step` on until the executor is dead; return why."""
    with pytest.raises(EngineDead) as death:
        while True:
            executor.launch(first_step(step, new_row(0, 5)))
            executor.collect()
            executor.launch(StepPlan(step, released=(0,)))
            executor.collect()
    with pytest.raises(EngineDead, match="rank 1 of 2"):
        executor.launch(StepPlan(7))
    return str(death.value)


@pytest.mark.parametrize(
    ("step", "misdeed", "reason"),
    [
        (812, lambda pid: os.kill(pid, signal.SIGKILL), r"was killed by signal 9"),
        (812, lambda pid: os.kill(pid, signal.SIGSTOP), r"was stopped by a signal"),
        (RAISES, None, r"failed while step 1004 ran: RuntimeError: the weights are wrong$"),
        (LOOPS, None, r"made no progress for \d+ s while step 1003 ran, and others wait for it$"),
        pytest.param(
            LOOPS_INSIDE,
            None,
            r"made no progress for \d+ s while step 1005 ran, and others wait for it$",
            marks=needs_program,
        ),
    ],
    ids=["killed", "stopped", "raises", "loops", "loops while the other is in a compiled program"],
)
def test_a_rank_that_fails_is_named_and_all_are_ended(
    step: int, misdeed: Callable[[int], None] | None, reason: str
) -> None:
    with leaving_nothing() as started:
        timeout = 1.0 if step in (LOOPS, LOOPS_INSIDE) else 1_000.0
        executor = make_ranked(config_of(timeout=timeout), module="faulty_rank_main")
        started += pids(executor)
        if misdeed is not None:
            executor.launch(first_step(811, new_row(0, 5)))
            executor.collect()
            executor.launch(StepPlan(811, released=(0,)))
            executor.collect()
            misdeed(started[1])
        said = launch_and_wait(executor, step)
        name = rf"^rank 1 of 2 \(stage 0, shard 1, pid {started[1]}\) "
        assert re.search(name + reason, said), said
        executor.close()


@pytest.mark.parametrize("step", [SLEEPS, pytest.param(SLEEPS_INSIDE, marks=needs_program)])
def test_a_rank_that_waits_for_something_that_never_comes_is_named_long_before_the_timeout(step: int) -> None:
    with leaving_nothing() as started:
        executor = make_ranked(config_of(timeout=100_000.0), module="faulty_rank_main")
        started += pids(executor)
        said = launch_and_wait(executor, step)
        where = rf"^rank 1 of 2 \(stage 0, shard 1, pid {started[1]}\)"
        assert re.search(rf"{where} hangs while step {step} ran: it sleeps, and others wait for it$", said), said
        executor.close()


@pytest.mark.parametrize("step", [LOOPS, pytest.param(LOOPS_INSIDE, marks=needs_program)])
def test_a_rank_in_an_endless_loop_is_named_long_before_the_timeout(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_STARVED_SECONDS", 100_000.0)  # else what was seen of steps is forgotten then
    with leaving_nothing() as started:
        executor = make_ranked(config_of(timeout=100_000.0), module="faulty_rank_main")
        started += pids(executor)
        finder = executor._watch._finder
        assert finder is not None
        while any(each.step_seconds == math.inf for each in finder._step_times):  # no whole step has been seen yet
            executor.launch(StepPlan(0))
            executor.collect()
        said = launch_and_wait(executor, step)
        where = rf"^rank 1 of 2 \(stage 0, shard 1, pid {started[1]}\) hangs: it has computed for"
        assert re.search(rf"{where} [0-9.]+ s while step {step} ran, and others wait for it$", said), said
        executor.close()


def test_a_rank_that_hangs_while_loading_is_named_with_its_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    find = FaultFinder._stuck_loading

    def find_at_last(self: FaultFinder, now: float) -> Fault | None:
        """Nobody is blamed before the other rank has done what it can, however slow this machine is."""
        other = self._ranks[0].page.read()
        hangs = self._ranks[1].page.doing().startswith(HANGS) and (other.waits or other.state == IDLE)
        return find(self, now) if hangs else None

    monkeypatch.setattr(FaultFinder, "_stuck_loading", find_at_last)
    config = config_of()
    config = replace(config, parallel=replace(config.parallel, load_timeout=0.2))
    launcher = ProcessLauncher(config.parallel, None, "faulty_rank_main")
    said = rf"^rank 1 of 2 \(.*\) made no progress for [0-9]+ s while it loaded \({HANGS}, 0 of 1\); check the disk"
    with pytest.raises(EngineDead, match=said):
        RankedExecutor(RankJob(replace(FILES, name=HANGS), MODEL, config, "dummy"), launcher)


def test_a_guided_step_may_wait_for_its_masks_as_long_as_the_engine_needs(ranked: RankedExecutor) -> None:
    ranked.launch(replace(first_step(0, new_row(0, 5)), guided=True))
    time.sleep(2)
    ranked.supply_masks(None)
    assert len(ranked.collect().token_ids) == 1
    ranked.launch(StepPlan(1, released=(0,)))
    assert ranked.collect().step == 1


class ThreadRank:
    """Implements Rank by a thread that sends a large result before it takes a large plan, as a CPU's rank may."""

    device_index, name, is_here = None, "a thread", True

    def __init__(self, number: int) -> None:
        self.place = config_of(tensor=2).parallel.place(number)
        self.page = LifePage(bytearray(PAGE_BYTES))
        self.page.ready()
        (self.control, control), (self.calls, self._calls) = channel_pair(), channel_pair()
        self.closed = False
        self._thread = threading.Thread(target=self._run, args=(Channel(control),), daemon=True)
        self._thread.start()

    def _run(self, channel: Channel) -> None:
        with contextlib.suppress(EOFError, OSError):
            channel.receive()
            channel.send(Kind.READY, encode((0, 0)))
            channel.send(Kind.RESULT, encode(StepResult(0, np.arange(1 << 20, dtype=np.int32))))
            while (message := channel.receive()) is not None and message.kind is not Kind.STOP:
                pass
        channel.close()

    def num_beats(self) -> int:
        return time.monotonic_ns()

    def ending(self) -> str | None:
        return None if self._thread.is_alive() else "ended"

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        self.control.shut()

    def close(self) -> None:
        self.control.close()
        self.calls.close()
        self._calls.close()
        self.closed = True
        if self.place.rank == 0:
            raise TimeoutError("it does not end")


class ThreadLauncher:
    """Implements RankLauncher."""

    rings = None

    def __init__(self) -> None:
        self.ranks = [ThreadRank(number) for number in range(2)]
        self.closed = False

    def start(self) -> list[ThreadRank]:
        return self.ranks

    def close(self) -> None:
        self.closed = True


def test_large_plans_and_results_do_not_block_each_other_and_all_ranks_are_closed_if_one_raises() -> None:
    launcher = ThreadLauncher()
    executor = RankedExecutor(RankJob(FILES, MODEL, config_of(), "dummy"), launcher)
    large = NewRow(0, np.arange(1 << 20, dtype=np.int32), 1, (0,), SamplingParams(), TokenRules(), 0, 7)
    found = []
    thread = threading.Thread(target=lambda: found.append([executor.launch(first_step(0, large)), executor.collect()]))
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the engine and a rank wait for each other"
    assert len(found[0][1].token_ids) == 1 << 20
    with pytest.raises(TimeoutError, match="does not end"):
        executor.close()
    assert [rank.closed for rank in launcher.ranks] == [True, True]
    assert launcher.closed


class OneStep:
    """In place of the queue of steps to collect: one of them, then the end."""

    def __init__(self) -> None:
        self._steps = [0]

    def get(self) -> int:
        return self._steps.pop()

    def empty(self) -> bool:
        return not self._steps


def test_a_rank_that_does_not_answer_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_module, "_CALL_SECONDS", 0.05)
    executor = RankedExecutor(RankJob(FILES, MODEL, config_of(tensor=2), "dummy"), ThreadLauncher())
    late = "did not answer within 0.05 s to a call about adapters, sleep or weights"
    said = rf"^rank 0 of 2 \(stage 0, shard 0, a thread\) {late}$"
    with pytest.raises(EngineDead, match=said):
        executor.read_adapter("mine", "/nowhere")
    with pytest.raises(TimeoutError, match="it does not end"):
        executor.close()


def test_a_rank_is_busy_until_its_last_step_has_ended() -> None:
    """The next step is launched while a thread waits for the device to end the one before."""
    (ours, theirs), (calls, others), page = channel_pair(), channel_pair(), LifePage(bytearray(PAGE_BYTES))
    server = RankServer(Channel(theirs), calls, page, lambda place: None, sys.exit)  # type: ignore[arg-type, return-value]
    server._executor = SimpleNamespace(collect=lambda: StepResult(7, np.zeros(1, dtype=np.int32)))  # type: ignore[assignment]
    states = []
    page.ready()
    for step in (7, 8):
        page.begin_step(step)
    for _ in range(2):
        server._collecting = OneStep()  # type: ignore[assignment]
        with pytest.raises(SystemExit):
            server._collect_steps()
        states.append(page.read().state)
    assert states == [BUSY, IDLE]
    for end in (ours, theirs, calls, others):
        end.close()


def test_closing_while_a_step_runs_ends_all_ranks() -> None:
    with leaving_nothing() as started:
        executor = make_ranked(config_of(timeout=60.0), module="faulty_rank_main")
        started += pids(executor)
        executor.launch(first_step(LOOPS, new_row(0, 5)))
        executor.close()
        assert [pid for pid in started if is_alive(pid)] == []


def test_ranks_end_with_the_process_that_started_them() -> None:
    program = (
        "import sys, time\n"
        "from ranked_engines import config_of, make_ranked, pids\n"
        "print(*pids(make_ranked(config_of())), flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)  # even one that cannot notice it
        process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, ranks))
