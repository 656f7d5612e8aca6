"""What an edge process leaves behind when it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest

from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.serving.process import edge_keeper
from quire.serving.process.control import ControlMessage
from quire.serving.process.edge_keeper import EdgeKeeper
from quire.serving.process.edge_loads import EDGE_LOADS, EdgeLoadTable
from quire.serving.process.listeners import open_listeners


class Child:
    """An edge process that says nothing, and ends when a test says so."""

    def __init__(self, _module: str, **_settings: object) -> None:
        self.has_ended = False

    def send(self, message: ControlMessage) -> None: ...

    def receive(self) -> list[ControlMessage]:
        return []

    def reap(self) -> str:
        return "was killed by SIGKILL"


def test_the_row_of_an_edge_that_died_is_cleared_before_its_successor_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_keeper, "ChildProcess", Child)
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments(), port=0, api_workers=2)
    with open_listeners(config) as listeners:
        keeper = EdgeKeeper(config, tmp_path, "none", listeners, on_start=lambda _: None, on_gone=lambda _: None)
        keeper.poll(0.0)
        alive, dying = (
            EdgeLoadTable(tmp_path / EDGE_LOADS, num_seats=2, seat=seat, edge=seat + 1) for seat in range(2)
        )
        alive.put(1, 10, 1, 1)
        dying.put(9, 90, 4, 8, retrying=True)
        list(keeper.children())[1].has_ended = True  # type: ignore[misc]
        keeper.poll(0.0)
    assert alive.others() == (0, 0, 0, 0)
    assert [load.edge for load in alive.loads()] == [1]
    assert dying.others() == (1, 10, 1, 0)


def test_an_edge_that_died_before_it_made_the_table_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_keeper, "ChildProcess", Child)
    gone: list[int] = []
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments(), port=0, api_workers=2)
    with open_listeners(config) as listeners:
        keeper = EdgeKeeper(config, tmp_path, "none", listeners, on_start=lambda _: None, on_gone=gone.append)
        keeper.poll(0.0)
        next(keeper.children()).has_ended = True  # type: ignore[misc]
        keeper.poll(0.0)
    assert gone == [1]


def test_an_edge_for_which_there_is_no_room_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(edge_keeper, "ChildProcess", refuse)
    config = ServerConfig(source=ModelSource(model="x"), engine=EngineArguments(), port=0)
    with open_listeners(config) as listeners:
        keeper = EdgeKeeper(config, tmp_path, "none", listeners, on_start=lambda _: None, on_gone=lambda _: None)
        keeper.poll(0.0)
        assert (keeper.failure, keeper.all_ended) == (None, True)
        monkeypatch.setattr(edge_keeper, "ChildProcess", Child)
        keeper.poll(time.monotonic() + 3600)
        assert (keeper.failure, keeper.all_ended) == (None, False)
