"""LoRA adapters over HTTP: loaded and unloaded by operators, named as the model by everybody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from http_server import TestServer, digests
from quire.config.arguments import EngineArguments
from quire.config.embedding import EmbeddingSettings, PoolingModel
from quire.config.engine import SchedulerConfig
from quire.config.server import AccessConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.service import Service
from quire.serving.process.link import EngineReady
from quire.types.adapters import AdapterInfo
from tests.http.conftest import Serve

ADMIN, USER = {"Authorization": "Bearer admin"}, {"Authorization": "Bearer user"}
ACCESS = AccessConfig(key_digests=digests("user"), admin_digests=digests("admin"))
SLOTS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, adapter_slots=2)


def say(prompt: str, index: int) -> str:
    return "yes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "chat", "bad"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "adapters" / "chat" / "pipe")
    return tmp_path / "adapters"


@pytest.fixture
def server(serve: Serve, folder: Path) -> TestServer:
    engine = EngineArguments(enable_lora=True, lora_dir=str(folder))
    return serve(say, access=ACCESS, engine=engine, scheduler=SLOTS)


def load(server: TestServer, name: str = "sql", path: str = "sql", **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more}, headers=ADMIN)


def unload(server: TestServer, name: str = "sql") -> Any:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)


def models(server: TestServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/models", headers=USER).json()["data"]
    return found


def text_of(server: TestServer, model: str) -> str:
    answer = server.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 20}, headers=USER)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_loaded_listed_used_and_unloaded(server: TestServer) -> None:
    assert [model["id"] for model in models(server)] == ["scripted", "other-name"]
    answer = load(server)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    shown = models(server)[-1]
    assert (shown["id"], shown["parent"], shown["root"]) == ("sql", "scripted", "sql")
    assert server.get("/v1/models/sql", headers=USER).json()["parent"] == "scripted"
    assert text_of(server, "sql") == "sql:yes"
    assert text_of(server, "scripted") == "yes"
    unknown = server.post("/v1/completions", {"model": "x", "prompt": "a"}, headers=USER)
    assert unknown.status_code == 404
    assert "served: scripted, other-name, sql;" in unknown.json()["error"]["message"]
    answer = unload(server)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [model["id"] for model in models(server)] == ["scripted", "other-name"]
    answer = server.post("/v1/completions", {"model": "sql", "prompt": "a"}, headers=USER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert unload(server).status_code == 404


def test_the_lists_of_ollama_have_adapters_under_names_that_it_takes(server: TestServer) -> None:
    load(server)
    for path in ("/api/tags", "/api/ps"):
        shown = server.get(path, headers=USER).json()["models"]
        assert [entry["model"] for entry in shown] == ["scripted:latest", "other-name:latest", "sql:latest"]
        parents = [entry["details"]["parent_model"] for entry in shown]
        assert parents == ["", "", "scripted"]
        assert shown[-1]["digest"] != shown[0]["digest"]
    asked = {"model": "sql:latest", **ASKED["/api/chat"]}
    assert "sql:yes" in server.post("/api/chat", asked, headers=USER).text
    assert unload(server).status_code == 200
    assert "sql" not in server.get("/api/tags", headers=USER).text


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/completion": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", ASKED)
def test_the_model_of_every_api_may_be_an_adapter(path: str, server: TestServer) -> None:
    load(server)
    answer = server.post(path, {"model": "sql", **ASKED[path]}, headers=USER)
    assert answer.status_code == 200, answer.text
    assert "sql:yes" in answer.text
    (request,) = server.link.submitted
    assert request.adapter == "sql"


def test_an_adapter_that_another_edge_loaded_is_found(server: TestServer, folder: Path) -> None:
    server.link.do(lambda: server.link.core.adapters.load("sql", str(folder / "sql")))  # type: ignore[union-attr]
    assert text_of(server, "sql") == "sql:yes"
    answer = server.post("/tokenize", {"model": "chat", "prompt": "a"}, headers=USER)
    assert answer.status_code == 404
    server.link.do(lambda: server.link.core.adapters.load("chat", str(folder / "sql")))  # type: ignore[union-attr]
    assert server.post("/tokenize", {"model": "chat", "prompt": "a"}, headers=USER).status_code == 200


def test_requests_that_name_a_new_adapter_at_once_are_all_answered(
    server: TestServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(server)  # what this edge asked at its start is answered
    server.link.do(lambda: server.link.core.adapters.load("sql", str(folder / "sql")))  # type: ignore[union-attr]
    count, unknown, asks = 12, [], []
    find, ask = Service.served_name, server.link.adapters

    def served_name(service: Service, asked: str | None) -> str:
        try:
            return find(service, asked)
        except ApiError:
            unknown.append(asked)
            raise

    async def adapters() -> tuple[AdapterInfo, ...]:
        asks.append(None)
        while len(unknown) < count:  # all requests fail before the engine answers
            await asyncio.sleep(0.001)
        return await ask()

    monkeypatch.setattr(Service, "served_name", served_name)
    monkeypatch.setattr(server.link, "adapters", adapters)
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(lambda _: text_of(server, "sql"), range(count))) == ["sql:yes"] * count
    assert len(asks) <= 2


def start_with(server: TestServer, folder: Path, change: Callable[[EngineReady], EngineReady] = lambda it: it) -> None:
    """Start the engine of a server with the adapter `sql`."""
    make_core = server.link._make_core

    def make() -> tuple[Any, EngineReady]:
        core, ready = make_core()
        core.adapters.load("sql", str(folder / "sql"))  # type: ignore[union-attr]
        return core, change(ready)

    server.link._make_core = make
    server.call(server.dispatcher.start)
    server.wait(lambda: server.dispatcher.engine is not None)


def test_the_adapters_of_an_engine_are_known_when_it_comes_up(serve: Serve, folder: Path) -> None:
    server = serve(say, engine=EngineArguments(enable_lora=True), scheduler=SLOTS, starts_up=False)
    start_with(server, folder)
    server.wait(lambda: "sql" in server.service.adapters)
    assert "sql" in [model["id"] for model in server.get("/v1/models").json()["data"]]


def test_what_generates_no_text_refuses_an_adapter(serve: Serve, folder: Path) -> None:
    model = PoolingModel("embed", 8, 512, 256, EmbeddingSettings(), by_decoder=True)
    server = serve(say, engine=EngineArguments(enable_lora=True), scheduler=SLOTS, starts_up=False)
    start_with(server, folder, lambda ready: replace(ready, pooling=model))
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = server.post(path, {"model": "sql", **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "model"
        assert "adapters are for calls that generate text" in error["message"]
        assert "scripted" in error["message"]
    assert server.link.submitted == []


def test_an_adapter_that_another_edge_unloaded_is_not_found(server: TestServer) -> None:
    load(server)
    assert text_of(server, "sql") == "sql:yes"
    server.link.do(lambda: server.link.core.adapters.unload("sql"))  # type: ignore[union-attr]
    answer = server.post("/v1/completions", {"model": "sql", "prompt": "a"}, headers=USER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_fork_goes_on_with_the_adapter_of_its_source(server: TestServer) -> None:
    load(server)
    first = server.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 20}, headers=USER).json()
    answer = server.post("/v1/fork", {"request_id": first["id"], "at_token": 2, "max_tokens": 9}, headers=USER)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "sql"
    assert server.link.submitted[-1].adapter == "sql"


def test_a_fork_is_refused_where_the_adapter_of_its_source_was_replaced(server: TestServer, folder: Path) -> None:
    load(server)
    first = server.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 20}, headers=USER).json()
    (folder / "new").mkdir()
    assert load(server, "sql", "new", load_inplace=True).status_code == 200
    body = {"request_id": first["id"], "at_token": 2, "max_tokens": 9}
    answer = server.post("/v1/fork", body, headers=USER)
    assert answer.status_code == 409, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("adapter_replaced", "request_id")
    assert "'sql' was replaced since" in error["message"]
    assert load(server, "sql", "sql", load_inplace=True).status_code == 200
    assert server.post("/v1/fork", body, headers=USER).status_code == 200


def test_loading_in_place_replaces_what_had_the_name(server: TestServer, folder: Path) -> None:
    load(server)
    again = load(server, "sql", "bad2", load_inplace=True)
    assert again.status_code == 400
    (folder / "new").mkdir()
    assert load(server, "sql", "new").status_code == 400
    assert load(server, "sql", "new", load_inplace=True).status_code == 200
    assert text_of(server, "sql") == "new:yes"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "sql"}, "lora_name"),
        ({"lora_name": "sql"}, "lora_path"),
        ({"lora_name": "scripted", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "default", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "sql"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "bad"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../secret"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "link"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "chat"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "nothing"}, "lora_path"),
        ({"lora_name": "x", "lora_path": 3}, "body.lora_path"),
        ({"lora_name": "x", "lora_path": "sql", "other": 1}, "body.other"),
    ],
)
def test_what_cannot_be_loaded_is_refused(body: dict[str, Any], param: str, server: TestServer) -> None:
    answer = server.post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in (param, param.removeprefix("body."))
    assert len(models(server)) == 2


SPELLINGS = (
    "/v1/load_lora_adapter",
    "/load_lora_adapter",
    "/v1/load_lora_adapter/",
    "/v1/v1/load_lora_adapter",
    "/openai/deployments/x/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/load_lora%5Fadapter",
)


@pytest.mark.parametrize("path", SPELLINGS)
def test_only_an_admin_may_load_adapters(path: str, server: TestServer) -> None:
    body = {"lora_name": "sql", "lora_path": "sql"}
    assert server.post(path, body, headers=USER).status_code == 401
    assert server.post(path, body).status_code == 401
    assert len(models(server)) == 2


def test_nothing_is_loaded_where_there_is_no_folder_or_no_admin(serve: Serve, folder: Path) -> None:
    server = serve(say, access=ACCESS, engine=EngineArguments(enable_lora=True), scheduler=SLOTS)
    answer = load(server)
    assert answer.status_code == 400
    assert "--lora-dir" in answer.json()["error"]["message"]
    engine = EngineArguments(enable_lora=True, lora_dir=str(folder))
    open_server = serve(say, engine=engine, scheduler=SLOTS)
    assert open_server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "sql"}).status_code == 404


def test_operators_see_how_many_adapters_slots_and_requests_there_are(serve: Serve, folder: Path) -> None:
    engine = EngineArguments(enable_lora=True, lora_dir=str(folder))
    slots = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, adapter_slots=1)
    server = serve(say, access=ACCESS, engine=engine, scheduler=slots)
    (folder / "new").mkdir()
    load(server)
    load(server, "new", "new")
    stats = server.get("/admin/stats", headers=ADMIN).json()["adapters"]
    assert (stats["loaded"], stats["slots"], stats["slots_used"], stats["waiting"]) == (2, 1, 0, 0)
    assert text_of(server, "sql") == "sql:yes"
    assert text_of(server, "new") == "new:yes"
    assert server.get("/admin/stats", headers=ADMIN).json()["adapters"]["requests"] == {"sql": 1, "new": 1}
