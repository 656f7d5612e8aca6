"""What clients and operators see while `quire serve` starts, and when it cannot."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.server import free_port
from real_server import PATIENCE, ROOT, RealServer
from tiny_served import FLAGS, write_tiny_model

FAKE_HUB = '''
"""Stands in for the hub: "downloads" for as long as the file `go` is missing."""
import time
from pathlib import Path

HERE = Path(__file__).parent

def snapshot_download(repository, *, local_files_only, **_):
    if local_files_only and not (HERE / "done").exists():
        raise FileNotFoundError("not here yet")
    while not (HERE / "go").exists():
        if (HERE / "fail").exists():
            raise ConnectionError("the hub hung up")
        time.sleep(0.02)
    (HERE / "done").touch()
    return str(HERE / "model")
'''


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake hub; its file `go` ends the download."""
    (tmp_path / "huggingface_hub.py").write_text(FAKE_HUB)
    write_tiny_model(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def run_serve(*flags: str, **environment: str) -> tuple[int, str]:
    """Run a server that must not start; its exit code and all that it said."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=False,
    )
    return done.returncode, done.stdout


def wait_for_503(url: str) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < deadline
        try:
            return httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 100_000}, verify=False, timeout=PATIENCE)
        except httpx.ConnectError:
            time.sleep(0.05)


def test_clients_are_told_503_and_when_to_come_back_while_the_model_is_downloaded(hub: Path) -> None:
    port, servers = free_port(), list[RealServer]()
    url = f"http://127.0.0.1:{port}"
    starting = threading.Thread(
        target=lambda: servers.append(RealServer(Path("org/tiny"), [*FLAGS, "--port", str(port)]))
    )
    starting.start()
    try:
        answer = wait_for_503(url)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "being downloaded" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health", verify=False, timeout=PATIENCE).status_code == 503
        assert httpx.head(f"{url}/v1/models", verify=False, timeout=PATIENCE).status_code == 503
    finally:
        (hub / "go").touch()
        starting.join(PATIENCE)
    (server,) = servers
    try:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        assert not server.processes("fetch_main")
    finally:
        server.close()


def test_a_download_that_fails_ends_the_server_with_one_line(hub: Path) -> None:
    (hub / "fail").touch()
    code, said = run_serve("org/tiny", "--port", "0")
    assert code == 1
    assert said.count("the hub hung up") == 1
    assert said.splitlines()[-1].startswith("quire: error: org/tiny: cannot be fetched from the hub")
    assert "Traceback" not in said


def test_a_signal_during_the_download_ends_the_server_at_once(hub: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(hub)])
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", "org/tiny", "--port", str(port)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    wait_for_503(f"http://127.0.0.1:{port}")
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", verify=False, timeout=PATIENCE)


def _bad_gguf(folder: Path) -> list[str]:
    (folder / "bad.gguf").write_bytes(b"GGUFxxxx")
    return [str(folder / "bad.gguf")]


def _unknown_architecture(folder: Path) -> list[str]:
    model = write_tiny_model(folder / "model")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodyForCausalLM").replace("llama", "no"))
    return [str(model)]


def _file_for_folder(folder: Path) -> list[str]:
    (folder / "file").touch()
    model = write_tiny_model(folder / "model")
    return [str(model), "--disk-cache-path", str(folder / "file"), "--disk-cache-memory", "1GiB",
            "--host-cache-memory", "64MiB"]  # fmt: skip


def _record_nowhere(folder: Path) -> list[str]:
    return [str(write_tiny_model(folder / "model")), "--record", str(folder / "none" / "run.jsonl")]


def _unknown_tokenizer(folder: Path) -> list[str]:
    return [str(write_tiny_model(folder / "model")), "--tokenizer", "nonesuch"]


def _unknown_draft(folder: Path) -> list[str]:
    config = '{"method": "draft_model", "model": "nonesuch"}'
    return [str(write_tiny_model(folder / "model")), "--speculative-config", config]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda _: ["/nothing/there"], "model: there is nothing at /nothing/there"),
        (lambda _: ["nonesuch"], "model: no model is called 'nonesuch'"),
        (_unknown_tokenizer, "tokenizer: no model is called 'nonesuch'"),
        (_unknown_draft, "speculative_config.model: no model is called 'nonesuch'"),
        (_bad_gguf, "bad.gguf: has GGUF version"),
        (_unknown_architecture, "NobodyForCausalLM"),
        (_file_for_folder, "disk_cache_path: "),
        (_record_nowhere, "record: "),
        (lambda _: ["--port", "70000"], "port: must be in [0, 65535]"),
        (lambda _: ["--step-timeout", "0"], "step_timeout: "),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line_before_a_process_starts(
    make: object, named: str, tmp_path: Path
) -> None:
    assert callable(make)
    flags: Sequence[str] = make(tmp_path)
    code, said = run_serve(*flags, *(() if "--port" in flags else ("--port", "0")))
    assert code in (1, 2)
    assert len(said.splitlines()) == 1, said
    assert named in said


def test_a_taken_port_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run_serve(str(write_tiny_model(tmp_path)), "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "is taken on 127.0.0.1" in said
