"""Prompts that operators keep resident, and who finds whose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from http_server import TestServer, digests
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.server import AccessConfig
from quire.serving.http import pinned_prefixes
from quire.types.errors import EngineDead
from tests.http.conftest import Serve
from tests.unit.serving.scripted import ids

ADMIN = {"Authorization": "Bearer admin"}
SYSTEM = "You are the voice of a small harbour town; answer briefly."
TENANTS = AccessConfig(key_digests=digests("k1", "k2"), admin_digests=digests("admin"))


def found(server: TestServer, prompt: str, key: str | None = None, **fields: Any) -> int:
    """Prompt tokens of a request that were in the cache."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def register(server: TestServer, **body: Any) -> Any:
    return server.post("/admin/prefixes", {"name": "system", "prompt": SYSTEM, **body}, headers=ADMIN)


def listed(server: TestServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.get("/admin/prefixes", headers=ADMIN).json()["prefixes"]
    return rows


def remove(server: TestServer, name: str) -> Any:
    with server.client() as client:
        return client.delete(f"/admin/prefixes/{name}", headers=ADMIN)


@pytest.fixture
def open_server(serve: Serve) -> TestServer:
    return serve(access=AccessConfig(admin_digests=digests("admin")))


def test_another_tenants_prompt_is_not_found_and_ones_own_is(serve: Serve) -> None:
    server = serve(access=TENANTS)
    assert found(server, SYSTEM, "k1") == 0
    assert found(server, SYSTEM, "k2") == 0
    assert found(server, SYSTEM, "k1") == len(ids(SYSTEM)) // 4 * 4  # of a prompt that was only sent, whole blocks
    assert found(server, SYSTEM, "k1", cache_salt="s") == 0
    assert found(server, SYSTEM, "k2", cache_salt="s") == 0


def test_tenants_share_only_where_the_operator_says_so(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("k1", "k2"), shares_cache=True))
    assert found(server, SYSTEM, "k1") == 0
    assert found(server, SYSTEM, "k2") == len(ids(SYSTEM)) // 4 * 4  # of a prompt that was only sent, whole blocks
    assert found(server, SYSTEM, "k2", cache_salt="s") == 0


def test_a_registered_prompt_is_found_listed_and_removed(open_server: TestServer) -> None:
    answer = register(open_server)
    count = len(ids(SYSTEM))
    blocks = -(-count // 4)
    assert answer.status_code == 201
    assert answer.json() == {"name": "system", "num_tokens": count, "num_blocks": blocks, "keys": 1}
    row = {"name": "system", "key": None, "num_tokens": count, "num_blocks": blocks, "resident": True}
    assert listed(open_server) == [row]
    assert found(open_server, SYSTEM + " Who are you?") == count
    stats = open_server.get("/admin/stats", headers=ADMIN).json()
    assert (stats["pinned_prefixes"], stats["blocks"]["pinned"]) == (1, blocks)
    assert remove(open_server, "system").json() == {"removed": 1}
    assert listed(open_server) == []
    assert remove(open_server, "system").status_code == 404
    open_server.wait(open_server.is_idle)


def test_a_prompt_of_token_ids_can_be_registered(open_server: TestServer) -> None:
    assert register(open_server, prompt=list(ids(SYSTEM))).json()["num_tokens"] == len(ids(SYSTEM))
    assert found(open_server, SYSTEM + " Who are you?") == len(ids(SYSTEM))


def test_the_beginning_of_a_conversation_can_be_registered(open_server: TestServer) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    body = {"name": "chat", "messages": messages}
    count = open_server.post("/admin/prefixes", body, headers=ADMIN).json()["num_tokens"]
    chat = {"messages": [*messages, {"role": "user", "content": "Hello?"}], "max_tokens": 1}
    usage = open_server.post("/v1/chat/completions", chat).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == count == len(ids(f"system:{SYSTEM}\n"))


def test_a_prompt_is_registered_for_every_key_or_for_one(serve: Serve) -> None:
    server = serve(access=TENANTS)
    assert register(server).json()["keys"] == 2
    assert [row["key"] for row in listed(server)] == [digest[:8] for digest in digests("k1", "k2")]
    for key in ("k1", "k2"):
        assert found(server, SYSTEM + " Who?", key) == len(ids(SYSTEM))
    assert register(server, name="one", prompt="Only for the first of them.", api_key="k1").json()["keys"] == 1
    assert found(server, "Only for the first of them.!", "k1") > 0
    assert found(server, "Only for the first of them.!", "k2") == 0
    strange = register(server, api_key="nobody's")
    assert (strange.status_code, strange.json()["error"]["param"]) == (400, "api_key")


def test_a_new_engine_is_told_of_registered_prompts(open_server: TestServer) -> None:
    register(open_server)
    open_server.link.kill()
    open_server.wait(lambda: open_server.dispatcher.engine is None)
    assert [row["resident"] for row in listed(open_server)] == [False]
    open_server.link.revive()
    open_server.wait(lambda: [row["resident"] for row in listed(open_server)] == [True])
    assert found(open_server, SYSTEM + " Who?") == len(ids(SYSTEM))


def test_registered_prompts_are_computed_before_what_waited_for_the_new_engine(serve: Serve) -> None:
    server = serve(access=TENANTS)
    register(server)
    server.link.kill()
    server.wait(lambda: server.dispatcher.engine is None)
    before = len(server.link.submitted)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(found, server, SYSTEM + " Who?", "k1")
        server.wait(lambda: len(server.dispatcher.requests()) == 1)
        server.link.revive()
        waiting.result()
    assert [submit.pin for submit in server.link.submitted[before:]] == ["system", "system", ""]


def test_more_prompts_than_may_wait_at_once_are_registered_one_after_the_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_prefixes, "_PAUSE", 0.01)
    few = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=512)
    server = serve(access=TENANTS, limits={"queue_requests": 1}, scheduler=few)
    for name in ("one", "two", "three"):
        assert register(server, name=name, prompt=SYSTEM + name).status_code == 201
    server.link.kill()
    server.link.revive()
    server.wait(lambda: [row["resident"] for row in listed(server)] == [True] * 6)


def test_a_prompt_that_is_refused_by_a_busy_engine_is_registered_when_it_has_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_prefixes, "_PAUSE", 0.01)
    server = serve(access=AccessConfig(admin_digests=digests("admin")), cache=CacheConfig(block_size=4, num_blocks=40))
    register(server, prompt="x" * 40)
    assert asyncio.run_coroutine_threadsafe(server.link.unpin("", "system"), server.loop).result(120)
    server.link.gate.clear()
    with ThreadPoolExecutor() as threads:
        large = threads.submit(found, server, "y", max_tokens=140)
        server.wait(lambda: server.dispatcher.num_in_engine == 1)
        before = len(server.link.submitted)
        server.call(server.service.pinned_prefixes.recall)
        server.wait(lambda: len(server.link.submitted) > before + 1)  # it is tried again
        assert [row["resident"] for row in listed(server)] == [False]
        server.link.gate.set()
        server.link.settle()
        large.result()
    server.wait(lambda: [row["resident"] for row in listed(server)] == [True])


def test_an_engine_that_does_not_answer_at_first_is_told_of_registered_prompts_too(
    open_server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_prefixes, "_PAUSE", 0.01)
    """Neither to prompts nor to the question which of them it holds."""
    kept, num_silent = open_server.service.pinned_prefixes, 4

    def hesitating(ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def hesitate(*arguments: Any) -> Any:
            nonlocal num_silent
            if num_silent:
                num_silent -= 1
                raise EngineDead("no answer")
            return await ask(*arguments)

        return hesitate

    assert register(open_server).status_code == 201
    assert register(open_server, name="other", prompt="Another prompt.").status_code == 201
    open_server.link.kill()
    monkeypatch.setattr(open_server.link, "pins", hesitating(open_server.link.pins))
    monkeypatch.setattr(kept, "_pin", hesitating(kept._pin))
    open_server.link.revive()
    open_server.wait(lambda: num_silent == 0)  # asked by the server itself
    open_server.wait(lambda: [row["resident"] for row in listed(open_server)] == [True, True])


@pytest.mark.parametrize("way", ["delete", "reset"])
def test_a_prompt_that_is_removed_while_a_new_engine_computes_it_is_not_held(open_server: TestServer, way: str) -> None:
    register(open_server)
    open_server.link.kill()
    open_server.link.gate.clear()
    before = len(open_server.link.submitted)
    open_server.link.revive()
    open_server.wait(lambda: len(open_server.link.submitted) > before)
    with ThreadPoolExecutor() as threads:
        if way == "delete":
            removing = threads.submit(remove, open_server, "system")
        else:
            removing = threads.submit(open_server.post, "/admin/reset_cache", {}, headers=ADMIN)
        open_server.wait(lambda: way == "delete" or not listed(open_server))
        open_server.link.gate.set()
        open_server.link.settle()
        assert removing.result().status_code == 200
    open_server.wait(open_server.is_idle)
    assert listed(open_server) == []
    open_server.wait(lambda: open_server.get("/admin/stats", headers=ADMIN).json()["pinned_prefixes"] == 0)


def test_a_reset_forgets_registered_prompts_for_good(open_server: TestServer) -> None:
    register(open_server)
    assert open_server.post("/admin/reset_cache", {}, headers=ADMIN).json()["freed_blocks"] > 0
    assert listed(open_server) == []
    open_server.link.kill()
    open_server.link.revive()
    open_server.wait(lambda: open_server.dispatcher.engine is not None)
    assert found(open_server, SYSTEM) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x"}, "name"),
        ({"name": "a"}, "prompt"),
        ({"name": "a", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"name": "a b", "prompt": "x"}, "body.name"),
        ({"name": "a", "prompt": "x", "tools": []}, "tools"),
        ({"name": "a", "prompt": "x", "ttl": 3}, "body.ttl"),
        ({"name": "a", "prompt": ["x", "y"]}, "body.prompt"),
    ],
)
def test_a_registration_that_is_not_clear_is_refused_by_field(open_server: TestServer, body: Any, param: str) -> None:
    answer = open_server.post("/admin/prefixes", body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert listed(open_server) == []


def test_what_does_not_fit_is_refused_for_all_keys_together(serve: Serve) -> None:
    server = serve(access=TENANTS, cache=CacheConfig(block_size=4, num_blocks=160))
    answer = register(server, prompt="x" * 200)  # 50 blocks each, and 80 of 160 may be held
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "80 of 160 are the limit" in answer.json()["error"]["message"]
    assert listed(server) == []
    server.wait(server.is_idle)


def test_a_registration_that_would_not_fit_for_all_keys_is_refused_before_anything_is_computed(serve: Serve) -> None:
    server = serve(access=TENANTS, cache=CacheConfig(block_size=4, num_blocks=160))
    assert register(server).status_code == 201
    rows, before = listed(server), len(server.link.submitted)
    assert [row["resident"] for row in rows] == [True, True]
    answer = register(server, prompt="x" * 200)  # for the first key alone it would fit
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert listed(server) == rows
    assert len(server.link.submitted) == before


def test_what_a_registration_replaced_comes_back_if_it_is_refused_after_all(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(access=TENANTS, cache=CacheConfig(block_size=4, num_blocks=160))
    register(server)
    rows = listed(server)

    async def see_no_limit(wanted: object) -> None: ...

    monkeypatch.setattr(server.service.pinned_prefixes, "_check_room", see_no_limit)
    assert register(server, prompt="x" * 200).status_code == 400
    server.wait(lambda: listed(server) == rows)
    for key in ("k1", "k2"):
        assert found(server, SYSTEM + " Who?", key) == len(ids(SYSTEM))


def test_only_admins_see_or_change_what_is_resident(serve: Serve) -> None:
    server = serve(access=TENANTS)
    assert server.get("/admin/prefixes", headers={"Authorization": "Bearer k1"}).status_code == 401
    assert server.post("/admin/prefixes", {}, headers={"Authorization": "Bearer k1"}).status_code == 401
    assert serve().get("/admin/prefixes").status_code == 404


def found_behind(server: TestServer, prompt: str, client: str | None) -> int:
    """Prompt tokens in the cache of a request that a router sends for the client with this key; None: for nobody."""
    headers = {"Authorization": "Bearer router"} | ({} if client is None else {"X-Quire-Client": digests(client)[0]})
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def test_a_prompt_is_pinned_for_clients_and_for_no_router(serve: Serve) -> None:
    access = AccessConfig(
        key_digests=digests("k1", "k2", "router"),
        router_digests=digests("router"),
        admin_digests=digests("admin"),
    )
    server = serve(access=access)
    assert register(server).json()["keys"] == 2
    assert [row["key"] for row in listed(server)] == [digest[:8] for digest in digests("k1", "k2")]
    assert found_behind(server, SYSTEM + " Who?", None) == 0


def test_a_prompt_is_pinned_for_a_client_that_only_a_router_knows(serve: Serve) -> None:
    access = AccessConfig(
        key_digests=digests("router"), router_digests=digests("router"), admin_digests=digests("admin")
    )
    server = serve(access=access)
    nobody = register(server)
    assert (nobody.status_code, nobody.json()["error"]["param"]) == (400, "api_key")
    assert register(server, api_key="ann").json()["keys"] == 1
    assert found_behind(server, SYSTEM + " Who?", "ann") == len(ids(SYSTEM))
    assert found_behind(server, SYSTEM + " Who?", "bob") == 0
    assert register(server, name="all", api_key="router").json()["keys"] == 1  # of a router that names nobody
    assert found_behind(server, SYSTEM + " Who else?", None) == len(ids(SYSTEM))
