"""One `quire serve` with the embedded model, which the clients of all files share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError
from real_server import RealServer

FOLDER = Path(__file__).parent
FLAGS = ("--threads", "1", "--max-num-seqs", "4", "--max-model-len", "2048", "--kv-cache-memory", "128MiB")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):  # a warning of a client about itself is no failure of the server
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@dataclass(frozen=True, slots=True)
class Served:
    """What a client must know of a server: its address, OpenAI's base URL, and the model's name."""

    url: str
    base_url: str
    model: str


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    try:
        resolve_model(None, offline=True)
    except QuireError as error:
        pytest.skip(f"the embedded model is not here: {error}")
    server = RealServer(Path("smollm2-135m-instruct"), FLAGS)
    try:
        yield Served(server.url, f"{server.url}/v1", "smollm2-135m-instruct")
    finally:
        server.close()
