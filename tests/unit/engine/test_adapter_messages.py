"""Loading and unloading LoRA adapters by messages to a running engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine_thread import PATIENCE, EngineThread, PlainEdge
from quire.engine.messages import AdapterAnswer, AdaptersAnswer, Ask, LoadAdapter, UnloadAdapter
from quire.types.adapters import AdapterInfo


@pytest.fixture
def engine(tmp_path: Path) -> EngineThread:
    thread = EngineThread(tmp_path)
    thread.executor.adapters.contents.update({"/a": "digest a", "/b": "digest b"})
    yield thread
    thread.stop()


@pytest.fixture
def edge(engine: EngineThread) -> PlainEdge:
    plain = PlainEdge(engine.address)
    yield plain
    plain.close()


def answer(edge: PlainEdge, number: int) -> AdapterAnswer:
    def found() -> list[AdapterAnswer]:
        return [said for said in edge.heard if isinstance(said, AdapterAnswer) and said.number == number]

    edge.wait(lambda: bool(found()))
    return found()[0]


def names(edge: PlainEdge, number: int) -> list[str]:
    edge.say(Ask(number, "adapters"))
    edge.wait(lambda: any(isinstance(said, AdaptersAnswer) and said.number == number for said in edge.heard))
    said = next(said for said in edge.heard if isinstance(said, AdaptersAnswer) and said.number == number)
    return [info.name for info in said.adapters]


def test_an_adapter_is_loaded_named_and_unloaded(engine: EngineThread, edge: PlainEdge) -> None:
    changes: list[tuple[AdapterInfo, ...]] = []
    engine.loop.on_adapters = changes.append
    edge.say(LoadAdapter(1, "sql", "/a"))
    assert answer(edge, 1).info == AdapterInfo("sql", "digest a", 8, 1_000, "/a")
    assert names(edge, 2) == ["sql"]
    edge.submit("r", [1, 2], adapter="sql")
    edge.submit("lost", [1, 2], adapter="chat")
    edge.wait(lambda: edge.has_ended("r") and "lost" in edge.refusals())
    assert edge.refusals()["lost"].field == "model"
    edge.say(UnloadAdapter(3, "sql"), UnloadAdapter(4, "sql"))
    assert answer(edge, 3).info is not None
    assert answer(edge, 4).field == "lora_name"
    assert [[info.name for info in known] for known in changes] == [["sql"], []]
    assert engine.executor.adapters.held == set()


def test_refusals_travel_as_they_are(engine: EngineThread, edge: PlainEdge) -> None:
    edge.say(LoadAdapter(1, "x", "/nowhere"), LoadAdapter(2, "", "/a"))
    refusal = answer(edge, 1).result()
    assert isinstance(refusal, Exception)
    assert "lora_path: '/nowhere' has no adapter" in str(refusal)
    assert answer(edge, 2).field == "lora_name"
    assert names(edge, 3) == []


def test_requests_run_while_an_adapter_is_read(engine: EngineThread, edge: PlainEdge) -> None:
    gate = threading.Event()
    engine.executor.adapters.on_read = lambda: gate.wait(PATIENCE)  # type: ignore[assignment,return-value]
    edge.say(LoadAdapter(1, "sql", "/a"), LoadAdapter(2, "sql", "/b"))
    assert "being loaded" in answer(edge, 2).reason
    edge.submit("r", [1, 2, 3], max_tokens=20)
    edge.wait(lambda: edge.has_ended("r"))
    assert not any(isinstance(said, AdapterAnswer) and said.number == 1 for said in edge.heard)
    gate.set()
    assert answer(edge, 1).info is not None  # an idle engine is woken by what was read


def test_an_unexpected_fault_of_reading_is_a_refusal(engine: EngineThread, edge: PlainEdge) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    engine.executor.adapters.on_read = fail
    edge.say(LoadAdapter(1, "sql", "/a"))
    assert "the disk is gone" in answer(edge, 1).reason
    edge.submit("r", [1, 2, 3])
    edge.wait(lambda: edge.has_ended("r"))
