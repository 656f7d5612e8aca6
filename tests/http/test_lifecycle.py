"""Clients that go away, engines that die, servers that shut down: every request ends once, nothing is left."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

from http_server import PATIENCE, TestServer, read_events
from quire.config.engine import SchedulerConfig
from quire.types.errors import EngineDead
from quire.types.request import Submit
from tests.http.conftest import Serve
from tests.unit.serving.scripted import ids

HI = [{"role": "user", "content": "hi"}]
ENDLESS = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
LASTING = {**ENDLESS, "max_tokens": 15_000}  # of an engine with room for it: runs for as long as any test
ROOMY = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=16_000)


def endless(prompt: str, index: int) -> str:
    return "z" * 500


class Ask(threading.Thread):
    """A request in its own thread, and what came of it."""

    def __init__(self, server: TestServer, **body: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, {"prompt": "x", **body}
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._server.post("/v1/completions", self._body)

    def result(self) -> httpx.Response:
        self.join(PATIENCE)
        assert self.answer is not None
        return self.answer


def open_request(server: TestServer, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_its_request_runs_is_aborted(serve: Serve, stream: bool) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.01)
    connection = open_request(server, {**LASTING, "stream": stream})
    server.wait(lambda: server.link.num_steps > 3)
    connection.close()
    server.wait(lambda: bool(server.link.aborts))
    server.wait(server.is_idle)
    assert server.link.num_steps < LASTING["max_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_queue_is_forgotten(serve: Serve, stream: bool) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(endless, scheduler=scheduler)
    server.link.gate.clear()
    connections = [open_request(server, {**ENDLESS, "stream": stream}) for _ in range(5)]
    server.wait(lambda: server.call(lambda: len(server.dispatcher.requests())) == 5)
    assert server.call(lambda: server.dispatcher.num_in_engine) == 1  # what the engine can run
    for connection in connections:
        connection.close()
    server.wait(lambda: server.call(lambda: not server.dispatcher.requests()))
    server.link.gate.set()
    server.link.settle()
    server.wait(server.is_idle)
    assert len(server.link.submitted) == 1


def test_a_request_that_the_link_cannot_take_stays_queued_and_is_counted_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(endless)
    submit, is_full, tries = server.link.submit, threading.Event(), [0]

    def refuse(request: Submit) -> None:
        tries[0] += 1
        if is_full.is_set():
            raise EngineDead("65536 messages to the engine are unsent")
        submit(request)

    monkeypatch.setattr(server.link, "submit", refuse)
    is_full.set()
    asked = [Ask(server, max_tokens=4, ignore_eos=True) for _ in range(3)]
    server.wait(lambda: tries[0] > 3 and server.call(lambda: len(server.dispatcher.requests())) == 3)
    assert server.call(lambda: (server.dispatcher.num_in_engine, server.dispatcher.num_waiting)) == (0, 3)
    server.link.kill()  # nothing was in it: nothing is blamed, and nothing is queued twice
    server.link.revive()
    is_full.clear()
    assert [one.result().json()["usage"]["completion_tokens"] for one in asked] == [4, 4, 4]
    assert len(server.link.submitted) == 3
    server.wait(server.is_idle)


def test_requests_cut_at_random_moments_leave_nothing_behind(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)
    server = serve(endless, scheduler=scheduler, step_seconds=0.001)
    rng = random.Random(5)
    for _ in range(60):
        connection = open_request(server, {**ENDLESS, "stream": rng.random() < 0.5, "n": rng.randint(1, 3)})
        time.sleep(rng.random() * 0.02)
        connection.close()
    server.wait(lambda: server.call(lambda: not server.dispatcher.requests()))
    server.wait(server.is_idle)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200


def test_requests_without_a_delivered_byte_outlive_their_engine_wherever_they_are(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(endless, scheduler=scheduler)
    server.link.gate.clear()
    asked = []
    for count in range(1, 5):
        asked.append(Ask(server, prompt=f"p{count}", max_tokens=4))
        server.wait(lambda count=count: server.call(lambda: len(server.dispatcher.requests())) == count)  # type: ignore[misc]
    server.link.kill()
    assert server.get("/health").status_code == 503
    assert server.get("/ready").json()["error"]["code"] == "restarting"
    late = Ask(server, prompt="late", max_tokens=4)
    server.wait(lambda: server.call(lambda: len(server.dispatcher.requests())) == 5)
    server.link.gate.set()
    server.link.revive()
    assert [one.result().status_code for one in (*asked, late)] == [200] * 5
    assert server.get("/health").status_code == 200
    first, *others = server.link.submitted
    assert others[0] == replace(first, request_id=others[0].request_id)  # the same request, before all others
    assert len(others) == 5


def test_a_request_is_in_two_deaths_at_most(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY)
    server.link.gate.clear()
    asked = Ask(server, prompt="deadly", max_tokens=4)
    for count in (1, 2):
        server.wait(lambda count=count: len(server.link.submitted) == count)  # type: ignore[misc]
        server.link.kill()
        server.link.revive()
    answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "quarantined")
    again = server.post("/v1/completions", {"prompt": "deadly", "max_tokens": 4, "seed": 3})
    assert (again.status_code, again.json()["error"]["code"]) == (503, "quarantined")
    assert 500 < int(again.headers["retry-after"]) <= 600
    server.link.gate.set()
    assert server.post("/v1/completions", {"prompt": "deadly", "max_tokens": 5}).status_code == 200
    assert len(server.link.submitted) == 3


def test_only_the_request_that_is_tried_is_to_blame_for_a_second_death(serve: Serve) -> None:
    """Three requests are in an engine that dies. They enter the next one by one, each after the one before has a token:
    the second one is in it without a token when it dies again."""
    server = serve(endless, scheduler=ROOMY)
    server.link.gate.clear()
    asked = []
    for count in range(1, 4):
        asked.append(Ask(server, prompt=f"p{count}", max_tokens=30))
        server.wait(lambda count=count: len(server.link.submitted) == count)  # type: ignore[misc]
    server.link.kill()
    server.link.revive()
    server.wait(lambda: len(server.link.submitted) == 4)
    server.link.settle()
    assert server.call(lambda: server.dispatcher.num_in_engine) == 1
    server.link.step()  # the first has its token now, and the second enters
    server.wait(lambda: len(server.link.submitted) == 5)
    server.link.kill()
    server.link.gate.set()
    server.link.revive()
    answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200, 503, 200]
    assert answers[1].json()["error"]["code"] == "quarantined"


def test_a_body_that_finished_well_between_two_deaths_is_not_refused(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY)
    for _ in range(3):
        server.link.gate.clear()
        asked = Ask(server, prompt="popular", max_tokens=4)
        server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) == 1)
        server.link.kill()
        server.link.gate.set()
        server.link.revive()
        assert asked.result().status_code == 200


def test_a_server_whose_model_loads_says_so(serve: Serve) -> None:
    server = serve(starts_up=False)
    assert server.get("/health").status_code == 503
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "retry-after" in answer.headers
    assert server.get("/v1/models").status_code == 200
    server.call(server.dispatcher.start)
    server.wait(lambda: server.dispatcher.engine is not None)
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_draining_server_finishes_what_it_has_and_takes_nothing_new(serve: Serve) -> None:
    server = serve()
    server.link.gate.clear()
    running = Ask(server, max_tokens=64)
    server.wait(lambda: server.call(lambda: len(server.dispatcher.requests())) == 1)
    server.start_drain(20)
    server.wait(lambda: server.dispatcher.is_draining)
    assert server.get("/ready").json()["error"]["code"] == "draining"
    assert server.get("/health").status_code == 200
    refused = server.post("/v1/completions", {"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.link.gate.set()
    server.link.settle()
    assert running.result().json()["choices"][0]["text"] == " answer 0 to <x>"
    server.join_drain()


def test_what_is_not_done_when_the_drain_ends_is_ended_with_an_error(serve: Serve) -> None:
    server = serve(endless)
    server.link.gate.clear()
    running = Ask(server, **ENDLESS)
    server.wait(lambda: server.call(lambda: len(server.dispatcher.requests())) == 1)
    server.start_drain(0.05)
    assert running.result().json()["error"]["code"] == "shutting_down"
    server.join_drain()


def test_a_queue_that_is_full_in_tokens_refuses_too(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(scheduler=scheduler, limits={"queue_tokens": 100})
    server.link.gate.clear()
    asked = []
    for count in range(1, 3):
        asked.append(Ask(server, prompt="x" * 60))
        server.wait(lambda count=count: server.call(lambda: len(server.dispatcher.requests())) == count)  # type: ignore[misc]
    refused = server.post("/v1/completions", {"prompt": "x" * 60})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    server.link.gate.set()
    server.link.settle()
    assert [one.result().status_code for one in asked] == [200, 200]


def test_lower_priority_numbers_leave_the_queue_first(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512, policy="priority")
    server = serve(scheduler=scheduler)
    server.link.gate.clear()
    asked = []
    for count, priority in enumerate((0, 0, 5, -5, 5), start=1):
        asked.append(Ask(server, prompt=f"p{count}", priority=priority))
        server.wait(lambda count=count: server.call(lambda: len(server.dispatcher.requests())) == count)  # type: ignore[misc]
    server.link.gate.set()
    server.link.settle()
    for one in asked:
        assert one.result().status_code == 200
    assert [submit.priority for submit in server.link.submitted] == [0, -5, 0, 5, 5]


def test_streams_in_a_dying_engine_end_with_an_error_event(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.005)
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LASTING, "stream": True}) as answer,
    ):
        events = read_events(answer)
        next(events)
        server.link.kill()
        rest = list(events)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["type"] == "server_error"


def test_a_failed_executor_ends_streams_that_had_begun_and_the_next_answers_the_others(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.005)
    whole = [Ask(server, prompt=f"p{number}", max_tokens=400) for number in range(2)]
    server.wait(lambda: len(server.link.submitted) == 2)
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LASTING, "stream": True}) as answer,
    ):
        events = read_events(answer)
        next(events)
        server.fail_executor()
        rest = list(events)
    assert rest[-2]["error"] == {**rest[-2]["error"], "type": "server_error", "code": "engine_restarted"}
    assert rest[-1] == "[DONE]"
    server.link.revive()
    assert [one.result().status_code for one in whole] == [200, 200]


def test_a_stream_in_line_gets_its_headers_at_once_and_a_comment_while_it_waits(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(scheduler=scheduler, limits={"ping_seconds": 1})
    server.link.gate.clear()
    ahead = [Ask(server, max_tokens=4)]
    server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) == 1)
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(4)] == [": queued", "", ": queued", ""]
        server.link.gate.set()
        server.link.settle()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert {one.result().status_code for one in ahead} == {200}


def test_a_stream_without_a_delivered_token_goes_on_with_the_next_engine(serve: Serve) -> None:
    server = serve()
    alone = server.events("/v1/completions", {"prompt": "abc", "n": 2})
    server.link.gate.clear()
    asked = Ask(server, prompt="abc", n=2, stream=True)
    server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) == 1)
    server.link.kill()
    server.link.gate.set()
    server.link.revive()
    assert asked.result().status_code == 200
    events = [json.loads(line[6:]) for line in asked.result().text.splitlines() if line.startswith("data: {")]
    texts = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) for index in range(2)]
    assert texts == [
        "".join(c["text"] for e in alone[:-1] for c in e["choices"] if c["index"] == index) for index in range(2)
    ]


def test_a_stream_whose_engine_is_silent_for_long_hears_that_it_is_not_forgotten(serve: Serve) -> None:
    server = serve(limits={"ping_seconds": 1})
    server.link.gate.clear()
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == ": working"
        server.link.gate.set()
        server.link.settle()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a_queued_stream_that_fails_ends_with_the_error_a_whole_answer_would_be(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(endless, scheduler=scheduler)
    server.link.gate.clear()
    ahead = [Ask(server, **ENDLESS)]
    server.wait(lambda: server.call(lambda: server.dispatcher.num_in_engine) == 1)
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer,
    ):
        server.start_drain(0.05)
        events = list(read_events(answer))
    assert [events[0]["error"]["code"], events[1]] == ["shutting_down", "[DONE]"]
    assert {one.result().status_code for one in ahead} == {503}
    server.join_drain()


def test_a_client_that_sends_a_second_request_and_hangs_up_is_aborted_too(serve: Serve) -> None:
    server = serve(endless, scheduler=ROOMY, step_seconds=0.01)
    connection = open_request(server, LASTING)
    server.wait(lambda: server.link.num_steps > 3)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    connection.close()
    server.wait(lambda: bool(server.link.aborts))
    server.wait(server.is_idle)
    assert [abort.request_id for abort in server.link.aborts] == [each.request_id for each in server.link.submitted]


def test_a_client_that_reads_nothing_of_a_whole_answer_is_cut_off(serve: Serve) -> None:
    """Nobody waits for a whole answer to be read, so its connection and its bytes would stay for good."""
    server = serve(limits={"stall_seconds": 1, "prompt_tokens": 2**21, "body_bytes": 2**24})
    body = json.dumps({"tokens": ids("\x01") * 2**21}).encode()  # six bytes of JSON each, more than a kernel keeps
    head = "POST /detokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", server.port))
        server.wait(lambda: len(server.server.server_state.connections) == 1)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait(lambda: not server.server.server_state.connections)
        received = 0
        with suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                received += len(part)
        assert received < 6 * 2**21  # the whole answer never left


def test_one_of_several_edges_can_fill_the_engine_alone(serve: Serve) -> None:
    server = serve(endless, api_workers=4, step_seconds=0.002)
    asked = [Ask(server, **ENDLESS) for _ in range(server.scheduler.max_num_seqs)]
    server.wait(lambda: len(server.link.submitted) == len(asked))
    assert {one.result().status_code for one in asked} == {200}


def test_the_queue_bound_is_one_for_all_edges(serve: Serve) -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=512)
    server = serve(scheduler=scheduler, api_workers=4, limits={"queue_requests": 4})
    server.link.gate.clear()
    asked = []
    for count in range(1, 5):  # one in the engine, three in line
        asked.append(Ask(server))
        server.wait(lambda count=count: server.call(lambda: len(server.dispatcher.requests())) == count)  # type: ignore[misc]
    server.elsewhere = (1, 1)
    refused = server.post("/v1/completions", {"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    server.elsewhere = (0, 0)
    asked.append(Ask(server))
    server.wait(lambda: server.call(lambda: len(server.dispatcher.requests())) == 5)
    server.link.gate.set()
    server.link.settle()
    assert {one.result().status_code for one in asked} == {200}
