"""Adapters that have left host memory are read again in a thread while their groups wait: no step reads files."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness import Harness
from quire.config.engine import SchedulerConfig
from quire.engine.scheduler.adapter_host import READING
from quire.simulator.reader import read_recording
from quire.simulator.replay import replay
from quire.simulator.what_if import Scenario
from quire.types.request import Abort
from recorded_load import RecordedLoad

PROMPT = [5, 9, 3, 7, 1, 2, 8, 4, 6]
PATIENCE = 120.0  # seconds until a thread that does not answer fails a test


def make(num_slots: int = 1, capacity: int = 2, names: str = "abc", **settings: Any) -> Harness:
    """With names in this order, host memory keeps the last ones."""
    harness = Harness(
        adapters={f"/{name}": f"digest {name}" for name in "abcdefgh"}, adapter_slots=num_slots,
        host_adapters=capacity, **settings,
    )  # fmt: skip
    harness.executor.adapters.capacity = capacity
    for name in names:
        harness.core.adapters.load(name, f"/{name}")
    return harness


class Gate:
    """Reading waits until the gate is opened."""

    def __init__(self, harness: Harness) -> None:
        self._open, self.reached = threading.Event(), threading.Event()
        self.threads: list[str] = []
        harness.executor.adapters.on_read = self._pass

    def _pass(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def run(harness: Harness) -> None:
    deadline = time.monotonic() + PATIENCE
    while harness.core.has_work:
        harness.step()
        assert time.monotonic() < deadline
    assert harness.core.dead is None, harness.core.dead


def test_others_run_while_the_adapter_of_a_waiting_group_is_read() -> None:
    harness = make()
    gate = Gate(harness)
    harness.submit("evicted", PROMPT, adapter="a", max_tokens=3)
    harness.submit("plain", PROMPT, max_tokens=5)
    for _ in range(8):
        harness.step()
    assert gate.reached.wait(PATIENCE)
    assert "plain" in harness.finished
    assert not any(plan.adapters for plan in harness.executor.plans)
    gate.open()
    run(harness)
    assert gate.threads == ["adapter-fetch"]
    assert harness.executor.adapters.num_read_in_steps == 0
    assert harness.finished["evicted"].error is None
    ledger = harness.finished["evicted"].ledger
    assert READING in next(entry.note for entry in ledger if entry.kind == "admitted")


def test_the_adapter_that_gets_the_next_slot_is_read_while_the_slot_is_busy() -> None:
    harness = make()
    harness.submit("busy", PROMPT, adapter="c", max_tokens=40)
    harness.step()
    gate = Gate(harness)
    harness.submit("next", PROMPT, adapter="a", max_tokens=3)
    harness.step()
    assert gate.reached.wait(PATIENCE)
    assert "busy" not in harness.finished
    gate.open()
    run(harness)
    assert gate.threads == ["adapter-fetch"]
    assert harness.executor.adapters.num_read_in_steps == 0


def test_an_adapter_that_is_in_its_slot_is_not_read() -> None:
    harness = make(capacity=1, names="a")
    harness.submit("first", PROMPT, adapter="a", max_tokens=3)
    run(harness)
    harness.core.adapters.load("b", "/b")  # which takes the place of the other one in host memory
    Gate(harness)
    harness.submit("again", PROMPT, adapter="a", max_tokens=3)
    run(harness)
    assert harness.finished["again"].error is None


def test_an_adapter_that_cannot_be_read_again_ends_its_requests_alone() -> None:
    harness = make()
    del harness.executor.adapters.contents["/a"]
    harness.executor.adapters.lost.add("digest a")
    harness.submit("lost", PROMPT, adapter="a", max_tokens=3)
    harness.submit("plain", PROMPT, max_tokens=3)
    run(harness)
    assert harness.finished["lost"].error is not None
    assert harness.finished["plain"].error is None
    harness.core.check()


def test_other_content_in_the_folder_is_forgotten() -> None:
    harness = make()
    harness.executor.adapters.contents["/a"] = "digest z"
    harness.executor.adapters.lost.add("digest a")  # a step finds that the files have changed
    harness.submit("changed", PROMPT, adapter="a", max_tokens=3)
    run(harness)
    assert harness.finished["changed"].error is not None
    assert harness.executor.adapters.held == {"digest a", "digest b", "digest c"}
    harness.core.check()


def test_an_adapter_that_is_unloaded_while_it_is_read_leaves_nothing_behind() -> None:
    harness = make()
    gate = Gate(harness)
    harness.submit("gone", PROMPT, adapter="a", max_tokens=3)
    harness.submit("plain", PROMPT, max_tokens=40)
    harness.step()
    assert gate.reached.wait(PATIENCE)
    harness.core.adapters.unload("a")
    harness.core.abort(Abort("gone"))
    harness.step()
    harness.core.check()
    gate.open()
    deadline = time.monotonic() + PATIENCE
    while "digest a" in harness.executor.adapters.held or harness.core.has_work:
        harness.step()
        assert time.monotonic() < deadline
    harness.core.check()
    assert harness.executor.adapters.held == {"digest b", "digest c"}


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_of_a_random_mix_reads_an_adapter(depth: int) -> None:
    rng = random.Random(depth)
    harness = make(2, 3, "abcdef", depth=depth)
    for number in range(40):
        harness.submit(f"r{number}", [*PROMPT, number % 5], adapter=rng.choice(["", *"abcdef"]), max_tokens=3)
        for _ in range(rng.randrange(3)):
            harness.step()
            harness.core.check()
    run(harness)
    assert all(message.error is None for message in harness.finished.values())
    assert len(harness.finished) == 40
    assert harness.executor.adapters.num_placed > 10
    assert harness.executor.adapters.num_read_in_steps == 0


def test_a_recorded_run_that_reads_adapters_again_is_decided_again(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(8, 32, 160, seed=7, adapter_slots=1, host_adapters=2)
    load = RecordedLoad(tmp_path / "run.jsonl", scheduler=scheduler, tokens="exact", depth=2)
    load.executor.adapters.contents.update({f"/{name}": f"digest {name}" for name in "abcd"})
    load.executor.adapters.capacity = 2
    rng = random.Random(1)
    for name in "abcd":
        load.core.adapters.load(name, f"/{name}")
    for number in range(20):
        load.submit(f"r{number}", [*PROMPT, number % 3], adapter=rng.choice(["", *"abcd"]), max_tokens=4)
        load.step()
    load.run()
    load.close()
    recording = read_recording(load.path)
    assert sum(len(step.fetched) for step in recording.steps()) > 3
    result = replay(recording)
    assert result.difference is None, str(result.difference)
    again = Scenario.from_recording(recording).run("again", recording.setup.cache, scheduler)
    assert [outcome.refused for outcome in again.outcomes] == [None] * 20
