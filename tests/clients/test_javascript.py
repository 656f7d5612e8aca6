"""OpenAI's JavaScript client and the AI SDK, as npm installs them. `make test-clients` installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_server import MODEL, TestServer
from tests.clients.scripted_chat import scripted_server

FOLDER = Path(__file__).parent / "javascript"
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="run npm install in tests/clients/javascript"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    one = scripted_server()
    yield one
    one.close()


def run(server: TestServer, program: str) -> dict[str, Any]:
    """What a program prints."""
    command = ["node", program, f"{server.url}/v1", MODEL]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_openais_client_gets_what_it_asks_for(server: TestServer) -> None:
    assert run(server, "openai.mjs") == {
        "whole": "one two three",
        "streamed": "one two three",
        "final": "one two three",
        "parsed": {"city": "Köln"},
        "arguments": {"city": "Köln"},
        "told": "It is sunny in Köln.",
        "retrieved": "one two three",
        "gone": 404,
        "chat": "one two three",
    }


def test_the_ai_sdk_gets_what_it_asks_for_with_its_defaults(server: TestServer) -> None:
    found = run(server, "ai_sdk.mjs")
    assert found.pop("tokens") > 0
    assert found == {
        "text": "one two three",
        "asked": ["Köln", "Köln"],
        "looped": "It is sunny in Köln.",
        "streamed": "It is sunny in Köln.",
        "finishReason": "stop",
        "conversation": "You wrote 2 messages.",
        "object": {"city": "Köln"},
        "thought": ["Well.", "I thought."],
    }
