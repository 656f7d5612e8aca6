"""Real servers for the long tests, and a place where they write down what they measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError
from real_server import RealServer
from tiny_served import FLAGS, write_tiny_model

Start = Callable[..., RealServer]
Note = Callable[..., None]


@pytest.fixture
def start_tiny(tmp_path: Path) -> Iterator[Start]:
    """start(*flags) -> a server of the tiny model; several end in the order they began."""
    yield from _starter(lambda: write_tiny_model(tmp_path / "tiny"), FLAGS)


@pytest.fixture
def start_default() -> Iterator[Start]:
    """start(*flags) -> a server of the default model, or of the one QUIRE_SOAK_MODEL names."""

    def find() -> Path:
        try:
            return resolve_model(os.environ.get("QUIRE_SOAK_MODEL"), offline=True).path
        except QuireError as error:
            pytest.skip(f"the default model is not here: {error}")

    yield from _starter(find, ())


def _starter(find: Callable[[], Path], common: Sequence[str]) -> Iterator[Start]:
    servers: list[RealServer] = []

    def start(*flags: str) -> RealServer:
        servers.append(RealServer(find(), [*common, *flags]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """note(name=figure, ...): print what was measured, and keep it in the file QUIRE_SOAK_OUT names, if any."""
    kept = os.environ.get("QUIRE_SOAK_OUT")

    def write(**figures: object) -> None:
        print(f"\n{request.node.name}: {figures}")
        if kept:
            with Path(kept).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"test": request.node.name, **figures}) + "\n")

    return write
