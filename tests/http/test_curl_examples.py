"""What the quickstart and the README tell people to type works, against `quire serve` as a user starts it."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
ROOT = Path(__file__).parents[2]
WRITTEN = "http://127.0.0.1:8000"
START_SECONDS = 600.0
FLAGS = ("--port", "0", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "64MiB")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if WRITTEN in block]


SHELL_PAGES = ("docs/quickstart.md", "README.md", "docs/guides/coming_from.md", "docs/guides/responses.md")
SHELL = [(page, block) for page in SHELL_PAGES for block in blocks(page, "sh")]
PYTHON = [(page, block) for page in ("docs/quickstart.md", "README.md") for block in blocks(page, "python")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server with the default model listens."""
    try:
        resolve_model(None, offline=True)
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")
    command = [sys.executable, "-m", "quire", "serve", *FLAGS]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        yield _ready_url(server)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(60)
        finally:
            server.kill()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
    assert code == 0


def _ready_url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            line = server.stdout.readline()
            if not line:
                break
            found = re.fullmatch(r"Quire serves \S+ on (http://\S+) \(ready in [\d.]+ s\)\n", line)
            if found:
                return found[1]
    raise AssertionError("the server did not become ready")


def run(url: str, block: str) -> str:
    done = subprocess.run(
        ["sh", "-e", "-c", block.replace(WRITTEN, url)], capture_output=True, text=True, timeout=600, check=True
    )
    assert '{"error"' not in done.stdout
    return done.stdout


def test_the_quickstart_has_examples_with_curl() -> None:
    assert len([page for page, _ in SHELL if page == "docs/quickstart.md"]) >= 5


@pytest.mark.parametrize(("page", "block"), SHELL, ids=lambda text: re.sub(r"\W+", " ", text)[:40])
def test_an_example_is_answered(url: str, page: str, block: str) -> None:
    shown = run(url, block)
    assert shown.strip()
    if '"stream": true' in block:
        assert shown.rstrip().endswith("data: [DONE]")
        events = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert "include_usage" not in block or events[-1]["usage"]["completion_tokens"] > 0
    elif "/completions" in block:
        answer = json.loads(shown)
        wanted = re.search(r'"n": (\d+)', block)
        assert len(answer["choices"]) == (int(wanted[1]) if wanted else 1)
        assert "explain=1" not in block or answer["quire"]["ledger"][-1]["kind"] == "finished"
        assert "top_logprobs" not in block or answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert "capital of France" not in block or "Paris" in shown


@pytest.mark.parametrize("program", blocks("docs/guides/responses.md", "python"), ids=lambda text: text[-40:])
def test_an_example_of_the_responses_api_is_answered(url: str, program: str) -> None:
    pytest.importorskip("openai")
    done = subprocess.run(
        [sys.executable, "-c", program.replace(WRITTEN, url)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "program"), PYTHON, ids=lambda text: re.sub(r"\W+", " ", text)[:40])
def test_the_client_example_is_answered(url: str, page: str, program: str) -> None:
    pytest.importorskip("openai")
    done = subprocess.run(
        [sys.executable, "-c", program.replace(WRITTEN, url)], capture_output=True, text=True, timeout=600, check=True
    )
    assert "Paris" in done.stdout
