"""When an engine counts as hung, and when another is started."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

import pytest

from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.engine.progress import ProgressRecord
from quire.serving.process import spawning
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import EngineUp
from quire.serving.process.engine_keeper import EngineKeeper
from quire.serving.process.link import EngineReady

READY = EngineReady(1, 128, 512, 8, 16, 64, "float32", "cpu", "fcfs", ())


class Child:
    """An engine that never ends by itself."""

    has_ended = False
    num_dumps = 0

    def dump_stacks(self) -> None:
        self.num_dumps += 1


def is_taken_for_hung(directory: Path, ready: EngineReady) -> bool:
    """Whether an engine is, whose step has taken twice as long as --step-timeout allows."""
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments(), step_timeout=0.1)
    keeper, child = EngineKeeper(config, directory, "none", on_down=lambda _: None), Child()
    keeper.child = cast("ChildProcess", child)
    record = ProgressRecord(directory / "progress-0")
    keeper.handle(EngineUp(ready, ""))
    record.begin_step()
    keeper.poll(0.0)
    time.sleep(0.2)
    keeper.poll(0.0)
    return child.num_dumps > 0


@pytest.mark.parametrize(("load", "is_hung"), [(0.0, True), (1_000.0, False)])
def test_a_step_on_processors_that_others_use_may_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, is_hung: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0))
    assert is_taken_for_hung(tmp_path, replace(READY, step_seconds=0.01)) == is_hung


def test_a_step_on_a_gpu_gets_no_more_time_on_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1_000.0, 0.0, 0.0))
    assert is_taken_for_hung(tmp_path, READY)


def test_the_first_engine_is_the_process_that_was_started_before(tmp_path: Path) -> None:
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments())
    with spawning.spawned_engine() as engine:
        keeper = EngineKeeper(config, tmp_path, "none", on_down=lambda _: None, spawned=engine)
        keeper.poll(0.0)
        assert keeper.child is not None
        assert keeper.child.pid == engine.process.pid
        keeper.kill()
        assert engine.process.poll() is not None


def test_an_engine_for_which_there_is_no_room_is_tried_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(spawning.subprocess, "Popen", refuse)
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments())
    reasons: list[str] = []
    keeper = EngineKeeper(config, tmp_path, "none", on_down=reasons.append)
    keeper.poll(0.0)
    assert keeper.child is None
    assert keeper.failure is None
    keeper.poll(time.monotonic() + 3600)
    assert keeper.failure == "cannot start a process: [Errno 11] Resource temporarily unavailable"
    assert reasons == [keeper.failure] * 2
