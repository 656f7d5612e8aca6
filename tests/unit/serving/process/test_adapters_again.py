"""The LoRA adapters of an engine that ended are loaded by the one that follows."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from harness import Harness
from quire.config.adapters import AdapterModule
from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.serving.process import engine_keeper
from quire.serving.process.control import AdaptersNow, ControlMessage, EngineStart, Unpacker, pack
from quire.serving.process.engine_keeper import EngineKeeper
from quire.serving.process.engine_process import load_adapters_again
from quire.serving.process.model_files import with_local_files
from quire.types.errors import ConfigError

GIVEN = AdapterModule("given", "/adapters/given")
CONFIG = ServerConfig(
    source=ModelSource(model="m"), engine=EngineArguments(enable_lora=True, lora_modules=["given=/adapters/given"])
)


class Child:
    """A child process that was told things and does nothing."""

    started: ClassVar[list[EngineStart]] = []
    has_ended = False

    def __init__(self, module: str, spawned: object = None) -> None:
        self.module = module

    def send(self, message: ControlMessage) -> None:
        (sent,) = Unpacker().feed(pack(message))
        assert isinstance(sent, EngineStart)
        self.started.append(sent)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineKeeper:
    Child.started = []
    monkeypatch.setattr(engine_keeper, "ChildProcess", Child)
    return EngineKeeper(CONFIG, tmp_path, "engine", on_down=lambda reason: None)


def test_the_first_engine_has_those_of_the_command_line(keeper: EngineKeeper) -> None:
    keeper._start(0.0)
    (start,) = Child.started
    assert start.config.engine.lora_modules == ["given=/adapters/given"]
    assert start.adapters == ()


def test_the_next_engine_has_those_that_the_last_one_had(keeper: EngineKeeper) -> None:
    keeper._start(0.0)
    loaded = AdapterModule("loaded", "/adapters/loaded")
    keeper.handle(AdaptersNow((GIVEN, loaded)))
    keeper._start(1.0)
    assert Child.started[-1].adapters == (GIVEN, loaded)
    assert Child.started[-1].config.engine.lora_modules is None  # they are not loaded twice
    keeper.handle(AdaptersNow(()))  # clients unloaded all of them
    keeper._start(2.0)
    assert Child.started[-1].adapters == ()
    assert Child.started[-1].config.engine.lora_modules is None


def test_an_adapter_that_is_gone_does_not_keep_the_engine_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(adapters={"/a": "digest a"}, adapter_slots=2)
    with caplog.at_level(logging.ERROR):
        load_adapters_again(harness.core, [AdapterModule("gone", "/gone"), AdapterModule("a", "/a")])
    assert [info.name for info in harness.core.adapters.listing()] == ["a"]
    assert "the LoRA adapter gone is gone" in caplog.text


def test_an_adapter_at_which_code_fails_does_not_keep_the_engine_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(adapters={"/a": "digest a", "/b": "digest b"}, adapter_slots=2)
    reads = iter([True])
    harness.executor.adapters.on_read = lambda: 1 / 0 if next(reads, False) else None
    with caplog.at_level(logging.ERROR):
        load_adapters_again(harness.core, [AdapterModule("b", "/b"), AdapterModule("a", "/a")])
    assert [info.name for info in harness.core.adapters.listing()] == ["a"]
    assert "the LoRA adapter b is gone" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_adapter_cannot_be_called_as_the_model_is(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.touch()
    engine = EngineArguments(enable_lora=True, lora_modules=["m=/adapters/m"])
    config = replace(CONFIG, source=ModelSource(model=str(model), served_names=("m",)), engine=engine)
    with pytest.raises(ConfigError, match="^lora_modules: 'm' is the name of the model itself"):
        with_local_files(config, offline=True)
