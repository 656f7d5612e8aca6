"""The operators' routes."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer, digests, read_events
from quire.config.server import AccessConfig
from quire.serving.process import peers
from quire.serving.process.control import AskAbort, AskEdges, EdgeAnswer, RequestRow
from quire.types.errors import EngineDead
from tests.http.conftest import Serve
from tests.http.test_lifecycle import LASTING, ROOMY, Ask, endless

HEADERS = {"Authorization": "Bearer admin"}


@pytest.fixture
def operated(serve: Serve) -> TestServer:
    access = AccessConfig(admin_digests=digests("admin"))
    return serve(endless, scheduler=ROOMY, access=access, step_seconds=0.005)


def test_one_request_is_ended_by_its_id(operated: TestServer) -> None:
    running, other = Ask(operated, **LASTING, request_id="a"), Ask(operated, **LASTING, request_id="b")
    operated.wait(lambda: operated.call(lambda: len(operated.dispatcher.requests())) == 2)
    answer = operated.post("/admin/abort", {"request_id": "cmpl-a"}, headers=HEADERS)
    assert answer.json() == {"aborted": 1, "unheard_edges": 0}
    assert running.result().json()["error"]["code"] == "aborted"
    assert operated.post("/admin/abort", {"all": True}, headers=HEADERS).json()["aborted"] == 1
    assert other.result().status_code == 503
    assert operated.told == []  # there are no other edges
    operated.wait(operated.is_idle)


@pytest.mark.parametrize("body", [{}, {"all": False}, {"all": True, "request_id": "x"}, {"what": 1}, []])
def test_an_abort_that_names_nothing_clear_is_refused(operated: TestServer, body: Any) -> None:
    assert operated.post("/admin/abort", body, headers=HEADERS).status_code == 400


@pytest.mark.parametrize("name", ["mine-1", "cmpl-mine-1", "mine-1x", "cmpl-mine-1x", "mine-1x4"])
def test_a_request_is_ended_by_any_of_its_names_or_the_beginning_of_one(operated: TestServer, name: str) -> None:
    given = name.removeprefix("cmpl-") if name.endswith("1") else "mine-1x42"
    running = Ask(operated, **{**LASTING, "prompt": ["a", "b"]}, request_id=given)
    other = Ask(operated, **LASTING, request_id="theirs")
    operated.wait(lambda: operated.call(lambda: len(operated.dispatcher.requests())) == 3)
    answer = operated.post("/admin/abort", {"request_id": name}, headers=HEADERS)
    assert answer.json()["aborted"] == 2  # one for each prompt
    assert running.result().json()["error"]["code"] == "aborted"
    operated.post("/admin/abort", {"all": True}, headers=HEADERS)
    other.result()


def test_a_name_that_fits_none_or_several_ends_nothing(operated: TestServer) -> None:
    asked = [Ask(operated, **LASTING, request_id=name) for name in ("job-1", "job-2")]
    operated.wait(lambda: operated.call(lambda: len(operated.dispatcher.requests())) == 2)
    unknown = operated.post("/admin/abort", {"request_id": "jobs"}, headers=HEADERS)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    several = operated.post("/admin/abort", {"request_id": "job"}, headers=HEADERS)
    assert (several.status_code, several.json()["error"]["code"]) == (409, "request_ambiguous")
    assert "2 live requests have ids that begin with this: cmpl-job-1, cmpl-job-2" in several.json()["error"]["message"]
    assert operated.call(lambda: len(operated.dispatcher.requests())) == 2
    operated.post("/admin/abort", {"all": True}, headers=HEADERS)
    assert {one.result().status_code for one in asked} == {503}


def other_edge(server: TestServer, rows: tuple[RequestRow, ...]) -> None:
    """Answer as the one other edge of `server` would, each time it is asked."""

    def answer(message: Any) -> None:
        if isinstance(message, AskEdges):
            server.loop.call_soon(server.peers.take, EdgeAnswer(message.asker, message.number, rows))

    server.peers._send = lambda message: (server.told.append(message), answer(message))[0]


def test_the_requests_of_all_edges_are_listed_and_can_be_ended(serve: Serve) -> None:
    access = AccessConfig(admin_digests=digests("admin"))
    server = serve(endless, scheduler=ROOMY, access=access, step_seconds=0.005, api_workers=2)
    row = RequestRow("chatcmpl-far~01", "far", "chatcmpl-far", 2, "chat", "queued", 0.5, 3, 1, True)
    other_edge(server, (row,))
    running = Ask(server, **LASTING, request_id="near")
    server.wait(lambda: server.link.num_steps > 2)
    found = server.get("/admin/requests", headers=HEADERS).json()
    assert found["unheard_edges"] == 0
    assert [(one["name"], one["edge"], one["state"]) for one in found["requests"]] == [
        ("near", 1, "running"),
        ("far", 2, "queued"),
    ]
    assert server.post("/admin/abort", {"request_id": "fa"}, headers=HEADERS).json()["aborted"] == 1
    assert server.told[-1] == AskAbort(("chatcmpl-far~01",))
    assert server.post("/admin/abort", {"all": True}, headers=HEADERS).json()["aborted"] == 2
    assert server.told[-1] == AskAbort(None)
    assert running.result().status_code == 503


def test_an_edge_that_does_not_answer_is_counted(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.05)
    server = serve(access=AccessConfig(admin_digests=digests("admin")), api_workers=3)
    assert server.get("/admin/requests", headers=HEADERS).json() == {"requests": [], "unheard_edges": 2}


def test_live_requests_are_listed_with_their_state(operated: TestServer) -> None:
    running = Ask(operated, **LASTING)
    operated.wait(lambda: operated.link.num_steps > 2)
    (row,) = operated.get("/admin/requests", headers=HEADERS).json()["requests"]
    assert (row["state"], row["prompt_tokens"], row["endpoint"]) == ("running", 1, "completions")
    operated.post("/admin/abort", {"all": True}, headers=HEADERS)
    running.result()


def test_the_block_map_is_streamed_while_somebody_watches(operated: TestServer) -> None:
    running = Ask(operated, **LASTING)
    operated.wait(lambda: operated.link.num_steps > 2)
    with operated.client() as client, client.stream("GET", "/admin/blocks", headers=HEADERS) as answer:
        events = read_events(answer)
        first, second = next(events), next(events)
    assert first["total"] == len(first["holders"]) == operated.cache.num_blocks
    assert first["requests"][0]["state"] == "running"
    held = first["requests"][0]["block_ids"]
    assert all(first["holders"][block] for block in held)
    assert second["step"] > first["step"]
    assert second["stats"]["running"] == 1
    operated.post("/admin/abort", {"all": True}, headers=HEADERS)
    running.result()


def test_counters_and_cache_are_at_hand(operated: TestServer) -> None:
    operated.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    operated.wait(operated.is_idle)
    stats = operated.get("/admin/stats", headers=HEADERS).json()
    assert (stats["finished"], stats["output_tokens"]) == (1, 3)
    assert stats["edge"] == {"waiting": 0, "preparing": 0, "in_engine": 0, "draining": False}
    assert [edge["waiting"] for edge in stats["edges"]] == [0]


def test_what_is_prepared_is_told_apart_from_what_waits(operated: TestServer) -> None:
    preparing = operated.call(operated.dispatcher.preparing)
    operated.call(preparing.__enter__)
    stats = operated.get("/admin/stats", headers=HEADERS).json()
    assert (stats["edge"]["waiting"], stats["edge"]["preparing"]) == (0, 1)
    assert operated.get("/load").json() == {"server_load": 1}
    operated.call(lambda: preparing.__exit__(None, None, None))


def test_a_reset_frees_what_is_cached_and_the_map_shows_what_is(operated: TestServer) -> None:
    body = {"prompt": "x" * 41, "max_tokens": 3}  # blocks of 4

    def cached_tokens() -> int:
        usage = operated.post("/v1/completions", body).json()["usage"]
        operated.wait(operated.is_idle)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached_tokens(), cached_tokens()] == [0, 40]
    with operated.client() as client, client.stream("GET", "/admin/blocks", headers=HEADERS) as answer:
        shown = next(read_events(answer))
    assert len(shown["cached"]) == shown["stats"]["blocks"]["cached"] == 10
    assert not any(shown["holders"])
    assert operated.post("/admin/reset_cache", {}, headers=HEADERS).json() == {"freed_blocks": 10}
    assert cached_tokens() == 0


def test_a_drain_is_passed_on(operated: TestServer) -> None:
    assert operated.post("/admin/drain", {}, headers=HEADERS).status_code == 202
    assert operated.drains_asked == 1


def test_admin_routes_say_when_the_engine_is_down(operated: TestServer) -> None:
    operated.link.kill()
    assert operated.get("/admin/stats", headers=HEADERS).status_code == 503
    with operated.client() as client, client.stream("GET", "/admin/blocks", headers=HEADERS) as answer:
        assert next(read_events(answer)) == {"engine": "down"}


def test_an_engine_in_a_long_step_is_not_shown_as_down(operated: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence() -> None:
        raise EngineDead("no answer")

    monkeypatch.setattr(operated.link, "block_map", silence)
    with operated.client() as client, client.stream("GET", "/admin/blocks", headers=HEADERS) as answer:
        assert next(answer.iter_lines()).startswith(":")
