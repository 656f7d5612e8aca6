"""Operators pause an engine, let it sleep and replace its weights over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from http_server import TestServer, digests
from quire.config.arguments import EngineArguments
from quire.config.server import AccessConfig
from quire.engine.command_messages import message_of
from quire.types.errors import InvalidRequest, QuireError
from quire.types.standby import Command, WeightUpdate
from tests.http.conftest import Serve

ADMIN, USER = {"Authorization": "Bearer admin"}, {"Authorization": "Bearer user"}
ACCESS = AccessConfig(key_digests=digests("user"), admin_digests=digests("admin"))
ROUTES = [
    ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/pause"), ("POST", "/resume"),
    ("GET", "/is_paused"), ("POST", "/release_memory_occupation"), ("POST", "/resume_memory_occupation"),
    ("POST", "/pause_generation"), ("POST", "/continue_generation"), ("POST", "/update_weights_from_disk"),
    ("GET", "/get_weight_version"),
]  # fmt: skip


def say(prompt: str, index: int) -> str:
    return "yes"


class FakeMemory:
    """What an executor that can sleep was asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.has_room = True

    def sleep(self, level: int, tags: Any) -> None:
        self.calls.append(level)

    def wake_up(self, tags: Any) -> None:
        if not self.has_room:
            raise QuireError("wake_up: no memory")
        self.calls.append(tuple(tags))

    def check_weights(self, update: WeightUpdate) -> bool:
        if update.path is not None and update.path.endswith("bad"):
            raise InvalidRequest("weights", "do not fit")
        self.calls.append(update.path)
        return True

    def apply_weights(self) -> bool:
        self.calls.append("applied")
        return False


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def server(serve: Serve, tmp_path: Path, memory: FakeMemory) -> TestServer:
    for name in ("good", "bad"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    (tmp_path / "weights" / "link").symlink_to(tmp_path)
    server = serve(say, access=ACCESS, engine=EngineArguments(weights_dir=str(tmp_path / "weights")))
    core = server.link.core
    for name in ("sleep", "wake_up", "check_weights", "apply_weights"):
        setattr(core.executor, name, getattr(memory, name))
    return server


def post(server: TestServer, path: str, body: Any = None) -> Any:
    return server.post(path, {} if body is None else body, headers=ADMIN)


def ask(server: TestServer) -> Any:
    return server.post("/v1/completions", {"prompt": "a", "max_tokens": 20}, headers=USER)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_an_admin_key_opens_these_routes_in_any_spelling(server: TestServer, method: str, path: str) -> None:
    for spelling in (path, f"{path}/"):
        if method == "GET":
            assert server.get(spelling, headers=USER).status_code == 401
            assert server.get(spelling, headers=ADMIN).status_code == 200
        else:
            assert server.post(spelling, {}, headers=USER).status_code == 401


def test_without_an_admin_key_there_are_no_such_routes(serve: Serve) -> None:
    server = serve(say)
    assert server.post("/sleep", {}).status_code == 404
    assert server.get("/is_sleeping").status_code == 404


def test_a_sleeping_engine_refuses_requests_with_503_until_it_wakes_up(server: TestServer, memory: FakeMemory) -> None:
    assert ask(server).status_code == 200
    assert post(server, "/sleep?level=2").json()["is_sleeping"]
    answer = ask(server)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_asleep"
    assert post(server, "/wake_up?tags=weights").json()["asleep"] == ["kv_cache"]
    assert post(server, "/wake_up").json()["has_weights"] is False
    assert ask(server).status_code == 503
    found = post(server, "/update_weights_from_disk").json()
    assert found["success"]
    assert found["weight_version"] == "default"
    assert ask(server).status_code == 200
    assert memory.calls == [2, ("weights",), ("kv_cache",), None, "applied"]


def test_a_request_wakes_an_engine_that_sleeps_because_it_was_idle(server: TestServer, memory: FakeMemory) -> None:
    link: Any = server.link
    for _ in range(2):
        link.do(link.core.standby.nap)
        state = server.get("/is_sleeping", headers=ADMIN).json()
        assert state["is_sleeping"]
        assert state["asleep"] == ["weights", "kv_cache"]
        assert ask(server).status_code == 200
        assert not server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]
    link.do(link.core.standby.nap)
    assert post(server, "/update_weights_from_disk").json()["success"]
    assert not server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]
    assert memory.calls == [*([1, ("weights", "kv_cache")] * 3), None, "applied"]


def test_a_wake_up_without_memory_is_a_503_and_the_engine_still_sleeps(server: TestServer, memory: FakeMemory) -> None:
    post(server, "/release_memory_occupation")
    memory.has_room = False
    answer = post(server, "/resume_memory_occupation")
    assert answer.status_code == 503
    assert "no memory" in answer.json()["error"]["message"]
    assert server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]
    memory.has_room = True
    assert post(server, "/resume_memory_occupation").status_code == 200
    assert ask(server).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model_path": "bad"}, "weights"),
        ({"model_path": "nothing"}, "model_path"),
        ({"model_path": "../weights"}, "model_path"),
        ({"model_path": "link"}, "model_path"),
        ({"model_path": "/etc"}, "model_path"),
        ({"model_path": "good", "flush_cache": False}, "flush_cache"),
        ({"model_path": "good", "mode": "now"}, "body.mode"),
        ({"model_path": "good", "surprise": 1}, "body.surprise"),
    ],
)
def test_a_wrong_update_names_its_field_and_changes_nothing(
    server: TestServer, memory: FakeMemory, body: dict[str, Any], field: str
) -> None:
    answer = post(server, "/update_weights_from_disk", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "applied" not in memory.calls


def test_an_update_takes_a_folder_of_the_operator_and_a_version(server: TestServer, memory: FakeMemory) -> None:
    answer = post(server, "/update_weights_from_disk", {"model_path": "good", "weight_version": "step-7"})
    assert answer.json()["weight_version"] == "step-7"
    assert memory.calls[0].endswith("/weights/good")
    assert server.get("/get_weight_version", headers=ADMIN).json()["weight_version"] == "step-7"


@pytest.mark.parametrize(
    "query", ["/sleep?level=3", "/sleep?mode=now", "/wake_up?tags=all", "/pause?clear_cache=x", "/sleep?x=1"]
)
def test_a_wrong_query_is_refused(server: TestServer, query: str) -> None:
    assert post(server, query).status_code == 400
    assert not server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/pause", "/resume"])
def test_a_body_is_not_ignored(server: TestServer, path: str) -> None:
    answer = post(server, path, {"level": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body.level"
    assert not server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]


@pytest.mark.parametrize("command", [Command("wake_up", tags=("all",)), Command("sleep", level=3)])  # type: ignore[arg-type]
def test_no_message_is_made_that_the_engine_cannot_decode(command: Command) -> None:
    with pytest.raises(InvalidRequest):
        message_of(1, command)


@pytest.mark.parametrize(("stop", "go"), [("/pause", "/resume"), ("/pause_generation", "/continue_generation")])
def test_requests_wait_while_the_engine_is_paused(server: TestServer, stop: str, go: str) -> None:
    assert post(server, stop).json()["is_paused"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server)
        assert server.get("/is_paused", headers=ADMIN).json()["is_paused"]
        assert not post(server, go).json()["is_paused"]
        assert answer.result(60).status_code == 200
