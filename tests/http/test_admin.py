"""The operators' routes."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer, digests, read_events
from quire.config.server import AccessConfig
from quire.types.errors import EngineDead
from tests.http.conftest import Serve
from tests.http.test_lifecycle import ENDLESS, Ask, endless

HEADERS = {"Authorization": "Bearer admin"}


@pytest.fixture
def operated(serve: Serve) -> TestServer:
    return serve(endless, access=AccessConfig(admin_digests=digests("admin")), step_seconds=0.005)


def test_one_request_is_ended_by_its_id(operated: TestServer) -> None:
    running, other = Ask(operated, **ENDLESS, request_id="a"), Ask(operated, **ENDLESS, request_id="b")
    operated.wait(lambda: operated.call(lambda: len(operated.desk.tickets())) == 2)
    answer = operated.post("/admin/abort", {"request_id": "cmpl-a"}, headers=HEADERS)
    assert answer.json() == {"aborted": 1}
    assert running.result().json()["error"]["code"] == "aborted"
    assert operated.post("/admin/abort", {"all": True}, headers=HEADERS).json() == {"aborted": 1}
    assert other.result().status_code == 503
    assert operated.aborts_asked == ["cmpl-a", None]  # of the other edges, which have their own
    operated.wait(operated.is_idle)


@pytest.mark.parametrize("body", [{}, {"all": False}, {"all": True, "request_id": "x"}, {"what": 1}, []])
def test_an_abort_that_names_nothing_clear_is_refused(operated: TestServer, body: Any) -> None:
    assert operated.post("/admin/abort", body, headers=HEADERS).status_code == 400


def test_live_requests_are_listed_with_their_state(operated: TestServer) -> None:
    running = Ask(operated, **ENDLESS)
    operated.wait(lambda: operated.link.num_steps > 2)
    (row,) = operated.get("/admin/requests", headers=HEADERS).json()["requests"]
    assert (row["state"], row["prompt_tokens"], row["endpoint"]) == ("running", 1, "completions")
    operated.post("/admin/abort", {"all": True}, headers=HEADERS)
    running.result()


def test_the_block_map_is_streamed_while_somebody_watches(operated: TestServer) -> None:
    running = Ask(operated, **ENDLESS)
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
    stats = operated.get("/admin/stats", headers=HEADERS).json()
    assert (stats["finished"], stats["output_tokens"]) == (1, 3)
    answer = operated.post("/admin/reset_cache", {}, headers=HEADERS)
    assert answer.json()["freed_blocks"] >= 0


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
