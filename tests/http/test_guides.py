"""What the guides on security and troubleshooting tell people to type does what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.runtime.loading.resolve import resolve_model
from quire.serving.cli import _parser
from quire.types.errors import QuireError
from real_server import RealServer

ROOT = Path(__file__).parents[2]
WRITTEN = "http://127.0.0.1:8000"
FLAGS = ("--threads", "1", "--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "64MiB")
SECURITY = (ROOT / "docs/guides/security.md").read_text(encoding="utf-8")
TROUBLES = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def refused_commands() -> list[tuple[str, str]]:
    """The commands of the first table with a part of the message that each of them prints."""
    rows = [line for line in section(TROUBLES, "The server does not start").splitlines() if line.startswith("| `")]
    return [(found[0], found[1]) for found in (re.findall(r"`([^`]+)`", row) for row in rows)]


def refused_requests() -> list[tuple[str, str, str]]:
    """The status and the code in a heading, and the command below it that causes them."""
    return re.findall(r"^### (\d+) `(\w+)`\n\n```sh\n(.*?)^```$", TROUBLES, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        resolve_model(None, offline=True)
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")
    return Path("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    one = RealServer(model, FLAGS)
    yield one
    one.close()


def run(block: str, url: str, folder: Path | None = None) -> str:
    text = block.replace(WRITTEN, url)
    done = subprocess.run(["sh", "-e", "-c", text], cwd=folder, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_every_server_command_of_the_guides_parses() -> None:
    lines = [line for page in (SECURITY, TROUBLES) for block in blocks(page) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("quire ")]
    assert len(commands) >= 4
    for command in commands:
        assert _parser().parse_args(shlex.split(command)[1:]).command == "serve"


@pytest.mark.model
@pytest.mark.parametrize(("command", "message"), refused_commands())
def test_a_server_that_cannot_start_says_what_the_table_says(
    model: Path, tmp_path: Path, command: str, message: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [str(taken.getsockname()[1]) if word == "8000" else word for word in shlex.split(command)[1:]]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "quire", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "QUIRE_OFFLINE": "1"},
        )
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@needs_curl
@pytest.mark.model
@pytest.mark.parametrize(("status", "code", "block"), refused_requests())
def test_a_request_is_refused_as_the_guide_says(server: RealServer, status: str, code: str, block: str) -> None:
    shown = run(block.replace("curl -s", "curl -s -w '\\n%{http_code}'"), server.url)
    body, _, last = shown.rpartition("\n")
    assert (last, json.loads(body)["error"]["code"]) == (status, code)


@needs_curl
@pytest.mark.model
def test_an_unknown_parameter_is_named_in_warnings(server: RealServer) -> None:
    (block,) = blocks(section(TROUBLES, "The answer is not what you expect"))
    found = json.loads(run(block, server.url))
    assert found["choices"]
    assert "temprature" in found["warnings"][0]


@needs_curl
@pytest.mark.model
def test_a_request_explains_where_its_time_went(server: RealServer) -> None:
    (block,) = blocks(section(TROUBLES, "It is slow"))
    assert json.loads(run(block, server.url))["quire"]["ledger"][-1]["kind"] == "finished"


@needs_curl
@pytest.mark.model
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_key_that_the_guide_makes_opens_the_server_and_nothing_else_does(model: Path, tmp_path: Path) -> None:
    make, _, ask = blocks(section(SECURITY, "Open it to other machines"))
    run(make, "", tmp_path)
    server = RealServer(model, (*FLAGS, "--api-key-file", str(tmp_path / "keys.txt")))
    try:
        answers = run(ask, server.url, tmp_path).replace("}{", "}\n{").splitlines()
        assert [json.loads(answer)["data"][0]["id"] for answer in answers] == [str(model)] * 2
        with server.client() as client:
            assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
            assert client.get("/health").status_code == 200
    finally:
        server.close()
