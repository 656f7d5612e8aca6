"""What the page about Anthropic's and Ollama's APIs tells people to type works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from http_server import TestServer
from quire.config.server import ModelSource

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/other_apis.md").read_text(encoding="utf-8")
WRITTEN, NAME, SAID = "http://127.0.0.1:8000", "smollm2-135m-instruct", "It is Paris."


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


CURL = [block for block in blocks("sh") if "curl" in block]
(SETTINGS,) = [block for block in blocks("sh") if "curl" not in block]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    one = TestServer(lambda *_: SAID, source=ModelSource(model=NAME, served_names=(NAME,)))
    yield one
    one.close()


def run(server: TestServer, command: list[str], **options: str) -> str:
    environment = {**os.environ, **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", CURL, ids=["anthropic", "ollama", "sglang", "tgi", "sagemaker"])
def test_an_example_with_curl_is_answered(server: TestServer, block: str) -> None:
    each = [f"curl{part}" for part in block.replace(WRITTEN, server.url).split("curl")[1:]]
    answers = [run(server, ["sh", "-e", "-c", command]) for command in each]
    assert len(answers) >= 2
    for answer in answers:
        assert all("error" not in json.loads(line) for line in answer.splitlines())
    pieces = [json.loads(line) for line in answers[0].splitlines()]
    said = [piece.get("message", {}).get("content", "") for piece in pieces if isinstance(piece, dict)]
    assert SAID in answers[0] or "".join(said) == SAID


def test_the_settings_of_agents_are_enough_for_the_anthropic_package(server: TestServer) -> None:
    pytest.importorskip("anthropic")
    (program,) = [block for block in blocks("python") if "anthropic" in block]
    settings = SETTINGS.replace(WRITTEN, server.url)
    assert run(server, ["sh", "-e", "-c", f'{settings}\nexec "$0" -c "$1"', sys.executable, program]) == SAID


def test_the_example_with_the_ollama_package_is_answered(server: TestServer) -> None:
    pytest.importorskip("ollama")
    (program,) = [block for block in blocks("python") if "ollama" in block]
    assert run(server, [sys.executable, "-c", program.replace(WRITTEN, server.url)]) == SAID


def test_the_example_with_hugging_faces_client_is_answered(server: TestServer) -> None:
    pytest.importorskip("huggingface_hub")
    (program,) = [block for block in blocks("python") if "huggingface_hub" in block]
    online = {"HF_HUB_OFFLINE": "0"}  # with 1, the client sends nothing to any server
    assert (
        run(server, [sys.executable, "-W", "ignore", "-c", program.replace(WRITTEN, server.url)], **online)
        == SAID + "\n"
    )
