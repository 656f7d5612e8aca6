"""OpenAI's JavaScript client over chat completions, as npm installs it. `make test-clients` installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Served

FOLDER = Path(__file__).parent / "javascript"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="run npm install in tests/clients/javascript"),
]


def test_chats_streams_tools_and_parsed_answers_arrive(served: Served) -> None:
    command = ["node", "chat_completions.mjs", served.base_url, served.model]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert served.model in found["models"]
    assert "Paris" in found["whole"]
    assert found["streamed"] == found["final"] == found["whole"]
    assert found["parsed"]["continent"] in ("Africa", "Asia", "Europe")
    assert set(found["arguments"]) == {"city"}
    assert found["streamedArguments"] == found["arguments"]
    assert found["told"]
    assert "Paris" in found["continued"]
    assert found["unknown"] == [404, "NotFoundError"]
