"""Disaggregated serving as a user starts it: a prefill server and a decode server that share blocks by shared memory.
Answers are those of one server, and a prefill server that dies costs time and nothing else."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serving.http import remote_prefill
from real_server import RealServer
from tiny_served import FLAGS as TINY
from tiny_served import write_tiny_model

NAME = f"test-{os.getpid()}"
FLAGS = (*TINY, "--max-model-len", "512", "--kv-cache-memory", "8MiB", "--host-cache-memory", "8MiB",
         "--block-size", "4", "--kv-transport", f"shm://{NAME}", "--kv-transport-memory", "32MiB")  # fmt: skip
PROMPT = "the quick brown fox jumps over the lazy dog " * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def servers(model: Path) -> Iterator[tuple[RealServer, RealServer]]:
    prefill = RealServer(model, (*FLAGS, "--kv-role", "prefill"))
    try:
        url = ("--prefill-url", prefill.url, "--prefill-min-tokens", "16")
        decode = RealServer(model, (*FLAGS, "--kv-role", "decode", *url))
        try:
            yield prefill, decode
        finally:
            decode.close()
    finally:
        if prefill._process.poll() is None:
            prefill.close()
        else:  # the test killed it; its processes see that and end
            prefill._reader.join()
            prefill._admin.close()
            assert prefill._process.stdout is not None
            prefill._process.stdout.close()


def ask(server: RealServer, prompt: str, **fields: object) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt came from another engine."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **fields}
    with server.client() as client:
        reply = client.post("/v1/completions?explain=true", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    notes = [entry["note"] for entry in found["quire"]["ledger"] if entry["kind"] == "cached"]
    remote = re.search(r"remote (\d+)", " ".join(notes))
    return found["choices"][0]["text"], 0 if remote is None else int(remote[1])


def test_a_decode_server_has_prompts_computed_elsewhere_and_goes_on_when_the_prefill_server_dies(
    servers: tuple[RealServer, RealServer],
) -> None:
    prefill, decode = servers
    expected, _ = ask(prefill, PROMPT, cache_salt="one")
    assert ask(decode, PROMPT, cache_salt="one") == (expected, 216)
    answer, num_remote = ask(decode, "now " + PROMPT)  # nobody has computed it: the decode server asks for that
    assert num_remote == 220
    assert ask(prefill, "now " + PROMPT)[0] == answer
    assert ask(decode, "short")[1] == 0

    os.kill(prefill.pid, signal.SIGKILL)
    prefill._process.wait()
    later, num_remote = ask(decode, "then " + PROMPT)
    assert num_remote == 0
    assert ask(decode, "then " + PROMPT)[0] == later
    decode.wait(lambda: "this server computes the prompt" in decode.output)


def test_an_unreachable_prefill_server_is_paused() -> None:
    from quire.config.server import PrefillConfig

    client = remote_prefill.RemotePrefill(PrefillConfig(urls=("http://127.0.0.1:9", "http://127.0.0.1:10")))
    client._paused[0] = float("inf")
    assert [client._choose(), client._choose()] == [1, 1]
    client._paused[1] = float("inf")
    assert client._choose() is None
