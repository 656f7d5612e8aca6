"""The server as processes: whatever dies is replaced, whoever waited is told, and nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_engine_main import CRASH, ENDLESS, HANG
from fake_executor import continuation
from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.serving.process import model_files
from quire.serving.process.announcing import Announcer
from quire.serving.process.listening import address_of, listen
from quire.serving.process.supervisor import Supervisor
from quire.types.errors import ConfigError, DoesNotFit
from stub_server import Asking, StubServer, is_alive

Serve = Callable[..., StubServer]
ENDLESS_REQUEST = json.dumps({"prompt": [1], "max_tokens": ENDLESS}).encode() + b"\n"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """One server that survives what several tests do to its processes."""
    server = StubServer(tmp_path_factory.mktemp("lasting") / "slow.gguf", step_timeout=2.0)
    server.wait_ready()
    yield server
    server.close()


@pytest.fixture
def server(lasting: StubServer) -> StubServer:
    lasting.wait(lambda: lasting.generation() is not None)
    return lasting


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[StubServer] = []

    def begin(model: str = "quick.gguf", **settings: object) -> StubServer:
        servers.append(StubServer(tmp_path / model, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_a_server_says_where_it_is_serves_and_stops_cleanly(serve: Serve) -> None:
    server = serve(api_workers=2)
    server.wait_ready()
    assert "Quire serves quick on http://127.0.0.1:" in server.output
    assert f"http://127.0.0.1:{server.port}/#admin=KEY" in server.output
    assert len(server.children("stub_edge")) == 2
    assert server.ask(prompt=[1, 2], max_tokens=5)["tokens"] == [continuation([1, 2], 5)]
    processes = server.children()
    assert len(processes) == 3
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not any(map(is_alive, processes))


def test_a_killed_engine_ends_its_requests_and_is_replaced(server: StubServer) -> None:
    for _ in range(2):
        before = _generation(server)
        running = Asking(server, prompt=[1], max_tokens=ENDLESS)
        server.wait(lambda: _running(server) == 1)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert running.result() == {"lost": "the engine process was killed by SIGKILL"}
        server.wait(lambda: _generation(server) > before)  # noqa: B023 - waits at once
    assert server.ask(prompt=[1], max_tokens=3)["tokens"] == [continuation([1], 3)]


def test_a_failed_executor_ends_its_requests_with_the_cause(server: StubServer) -> None:
    before = _generation(server)
    assert server.ask(prompt=[CRASH], max_tokens=3)["lost"] == "the engine stopped: RuntimeError('device lost')"
    server.wait(lambda: _generation(server) > before)
    assert f"engine {before} ended: the engine stopped: RuntimeError('device lost')" in server.output


def test_a_hung_step_dumps_its_stacks_and_the_engine_is_replaced(server: StubServer) -> None:
    before = _generation(server)
    assert server.ask(prompt=[HANG], max_tokens=3) == {"lost": "a step took longer than 2 s"}
    server.wait(lambda: _generation(server) > before)
    assert "in launch" in server.output  # the stack of the thread that hung


def test_a_killed_edge_is_replaced_and_its_requests_leave_the_engine(server: StubServer) -> None:
    before = _generation(server)
    first = server.ask(ask="state")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(ENDLESS_REQUEST)
        server.wait(lambda: _running(server) == 1)
        os.kill(int(str(first["pid"])), signal.SIGKILL)
        second = server.ask(ask="state")
    assert int(str(second["edge"])) > int(str(first["edge"]))
    server.wait(lambda: _generation(server) == before)
    server.wait(lambda: _running(server) == 0)
    assert server.ask(prompt=[1], max_tokens=3)["tokens"] == [continuation([1], 3)]


def test_an_edge_whose_process_is_frozen_is_noticed_and_replaced(serve: Serve) -> None:
    server = serve(edge_timeout=3.0)
    server.wait_ready()
    (frozen,) = server.children("stub_edge")
    os.kill(frozen, signal.SIGSTOP)
    server.wait(lambda: server.children("stub_edge") not in ([], [frozen]))
    assert "edge 1 hangs: its event loop did not answer for 3 s" in server.output
    assert not is_alive(frozen)
    assert server.ask(prompt=[1], max_tokens=3)["tokens"] == [continuation([1], 3)]


def test_an_edge_whose_event_loop_is_blocked_writes_its_stacks_and_is_replaced(serve: Serve) -> None:
    server = serve(edge_timeout=3.0)
    server.wait_ready()
    first = server.ask(ask="state")["edge"]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(json.dumps({"ask": "block"}).encode() + b"\n")
        server.wait(lambda: "another one starts in 0 s" in server.output)
    assert server.ask(ask="state")["edge"] != first
    assert "in block_event_loop" in server.output  # the stack of the thread that hung


def test_a_load_without_progress_is_noticed_and_ends_the_server_after_a_second_try(serve: Serve) -> None:
    server = serve("stalls.gguf", load_timeout=15.0)
    assert server.wait_exit() == 1
    assert server.lines[-1] == "quire: error: loading made no progress for 15 s (in phase: loading)"
    assert server.output.count("the engine hangs: loading made no progress for 15 s") == 2
    assert "in load" in server.output


def test_draining_lets_what_runs_finish(serve: Serve) -> None:
    server = serve("slow.gguf")
    server.wait_ready()
    running = Asking(server, prompt=[1], max_tokens=40)
    server.wait(lambda: server.ask(ask="state")["accepted"] == 1)
    server.signal(signal.SIGINT)
    assert running.result()["tokens"] == [continuation([1], 40)]
    assert server.wait_exit() == 0


def test_draining_has_an_end(serve: Serve) -> None:
    server = serve("slow.gguf", drain_seconds=0.1)
    server.wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(ENDLESS_REQUEST)
        server.wait(lambda: _running(server) == 1)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_a_second_signal_forces_the_end(serve: Serve) -> None:
    server = serve("slow.gguf")
    server.wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(ENDLESS_REQUEST)
        server.wait(lambda: _running(server) == 1)
        processes = server.children()
        server.signal(signal.SIGTERM)
        server.wait(lambda: "stopping (SIGTERM)" in server.output)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 128 + signal.SIGTERM
    assert not any(map(is_alive, processes))


def test_an_admin_may_ask_for_the_drain(serve: Serve) -> None:
    server = serve()
    server.wait_ready()
    assert server.ask(ask="drain") == {"asked": True}
    assert server.wait_exit() == 0


def test_an_admins_abort_reaches_the_other_edges_and_only_those(serve: Serve) -> None:
    server = serve(api_workers=2)
    server.wait_ready()
    asked = server.ask(ask="abort", ids=["me"])["asked"]
    heard: dict[object, object] = {}

    def have_both_answered() -> bool:
        state = server.ask(ask="state")
        heard[state["edge"]] = state["aborts"]
        return len(heard) == 2 and any(heard.values())

    server.wait(have_both_answered)
    assert heard.pop(asked) == []
    assert list(heard.values()) == [[["me"]]]


def test_an_edge_can_ask_all_others_what_they_look_after(serve: Serve) -> None:
    server = serve(api_workers=3)
    server.wait_ready()
    answer = server.ask(ask="peers")
    assert answer["missing"] == 0
    assert answer["others"] == sorted({1, 2, 3} - {answer["edge"]})


def test_killing_the_supervisor_leaves_no_process(serve: Serve) -> None:
    server = serve("slow.gguf", api_workers=2)
    server.wait_ready()
    processes = server.children()
    assert len(processes) == 3
    server.signal(signal.SIGKILL)
    server.wait_exit()
    server.wait(lambda: not any(map(is_alive, processes)))


def test_stopping_while_the_engine_loads_ends_at_once(serve: Serve) -> None:
    server = serve()
    server.wait(lambda: len(server.children()) == 2)
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_cause(serve: Serve) -> None:
    server = serve("broken.gguf")
    assert server.wait_exit() == 1
    assert server.lines[-1] == "quire: error: weights.gguf: is cut short; download it again"
    assert server.output.count("is cut short") == 1
    assert "Traceback" not in server.output


def test_an_engine_that_dies_twice_while_loading_ends_the_server(serve: Serve) -> None:
    server = serve("dies.gguf")
    assert server.wait_exit() == 1
    assert server.lines[-1] == "quire: error: the engine process exited with code 3"
    assert server.output.count("engine 1 ended: the engine process exited with code 3; another one starts in 0 s") == 1


def test_an_edge_that_cannot_start_ends_the_server_with_the_cause(serve: Serve) -> None:
    server = serve("edgeless.gguf")
    assert server.wait_exit() == 1
    assert server.lines[-1] == "quire: error: the edge cannot be"
    assert server.output.count("the edge cannot be") == 1


def test_a_taken_port_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with listen("127.0.0.1", 0)[0] as taken:
        config = ServerConfig(
            source=ModelSource(model=str(tmp_path / "m.gguf")),
            engine=EngineArguments(),
            port=taken.getsockname()[1],
        )
        with pytest.raises(ConfigError, match="port: .* is taken on 127.0.0.1; choose another with --port"):
            Supervisor(config).run()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("api_workers", 0),
        ("step_timeout", 0.0),
        ("load_timeout", 0.0),
        ("edge_timeout", float("inf")),
        ("max_restart_delay", -1.0),
        ("drain_seconds", float("inf")),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: str, value: float) -> None:
    settings = {setting: value}
    config = ServerConfig(source=ModelSource(model="m"), engine=EngineArguments(), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{setting}:"):
        Supervisor(config).run()


def test_a_cache_larger_than_the_memory_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "may_have_gpu", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    config = ServerConfig(source=ModelSource(model="m"), engine=EngineArguments(kv_cache_memory="900TiB"), port=0)
    with pytest.raises(DoesNotFit, match="^kv_cache_memory: 921600 GiB are needed, .* are available on cpu"):
        Supervisor(config).run()


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_the_address_shown_is_one_a_browser_can_open(host: str, shown: str) -> None:
    with listen(host, 0)[0] as listener:
        assert address_of(listener, host) == f"http://{shown}:{listener.getsockname()[1]}"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host: 203.0.113.1 is not an address of this machine"):
        listen("203.0.113.1", 0)


def _generation(server: StubServer) -> int:
    """Of the engine, 0 while it is down."""
    return server.generation() or 0


def _running(server: StubServer) -> int:
    stats = server.ask(ask="stats").get("stats")
    return int(stats["running"]) if isinstance(stats, dict) else -1


def test_several_edges_share_one_port_that_nobody_else_has() -> None:
    sockets = listen("127.0.0.1", 0, count=3)
    try:
        ports = {each.getsockname()[1] for each in sockets}
        assert len(ports) == 1
        with pytest.raises(ConfigError, match="is taken"):
            listen("127.0.0.1", ports.pop(), count=3)
    finally:
        for each in sockets:
            each.close()


def test_the_ready_lines_name_the_file_of_the_admin_key_and_not_the_key() -> None:
    out = io.StringIO()
    Announcer(out=out, err=io.StringIO()).ready("tiny", "http://127.0.0.1:8000", 1.0, None, "/private/admin-key")
    assert out.getvalue().splitlines() == [
        "Quire serves tiny on http://127.0.0.1:8000 (ready in 1.0 s)",
        "The admin key is in /private/admin-key",
    ]
