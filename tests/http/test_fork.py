"""POST /v1/fork: going on from the middle of an answer."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from http_server import PATIENCE, TestServer, digests, read_events
from quire.config.server import AccessConfig
from tests.http.conftest import Serve

FORK, CHAT, COMPLETIONS = "/v1/fork", "/v1/chat/completions", "/v1/completions"
STORY = "once upon a time there was a story"


def script(prompt: str, index: int) -> str:
    """The story, from wherever the prompt has come to."""
    _, _, told = prompt.rpartition(":")
    return STORY[len(told) :] if STORY.startswith(told) else f" number {index}"


@pytest.fixture(scope="module")
def server() -> Any:
    one = TestServer(script)
    yield one
    one.call(one.service.recent_requests.check)
    one.wait(one.is_idle)
    one.close()


def fork(server: TestServer, request_id: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(FORK, {"request_id": request_id, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def finished(server: TestServer, **fields: Any) -> str:
    answer = server.post(COMPLETIONS, {"prompt": "x:", "max_tokens": 40, **fields}).json()
    return str(answer["id"])


def test_a_finished_answer_is_forked_at_any_token(server: TestServer) -> None:
    name = finished(server)
    answer = fork(server, name, at_token=5)
    assert answer["choices"][0]["text"] == STORY[5:]
    assert answer["id"].startswith("fork-")
    assert answer["usage"]["prompt_tokens"] == len("x:") + 5
    assert fork(server, name, at_token=5, echo=True)["choices"][0]["text"] == STORY
    assert fork(server, name, at_token=0)["choices"][0]["text"] == STORY


def test_without_a_place_it_goes_on_where_the_answer_ended(server: TestServer) -> None:
    name = finished(server, max_tokens=4)
    assert fork(server, name, max_tokens=5)["choices"][0]["text"] == " upon"


def test_a_branch_has_parameters_of_its_own(server: TestServer) -> None:
    name = finished(server)
    answer = fork(server, name, at_token=4, n=3, temperature=0.5, stop=" a", return_token_ids=True)
    assert [choice["text"] for choice in answer["choices"]] == [" upon"] * 3
    searched = fork(server, name, at_token=4, use_beam_search=True, best_of=2)
    assert searched["choices"][0]["text"] == STORY[4:]


def test_branches_and_chats_are_forked_too(server: TestServer) -> None:
    chat = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]}, headers={"X-Request-Id": "mine"}).json()
    first = fork(server, chat["id"], at_token=4, max_tokens=5)
    assert first["choices"][0]["text"] == " upon"
    assert fork(server, first["id"])["choices"][0]["text"] == STORY[9:]
    assert fork(server, "mine", at_token=1)["choices"][0]["text"] == STORY[1:]


def test_every_choice_of_several_prompts_can_be_forked(server: TestServer) -> None:
    answer = server.post(COMPLETIONS, {"prompt": ["x:", "y:"], "n": 2, "max_tokens": 3}).json()
    branch = fork(server, answer["id"], index=3, return_token_ids=True)
    assert branch["choices"][0]["text"] == STORY[3:]
    ids = server.post("/tokenize", {"prompt": "y:onc"}).json()["tokens"]
    assert branch["choices"][0]["prompt_token_ids"] == ids


def test_a_running_answer_is_forked_while_it_is_streamed(serve: Serve) -> None:
    server, launches = serve(script), itertools.count(1)

    def hold() -> None:
        if next(launches) == 4:
            server.link.gate.clear()

    assert server.executor is not None
    server.executor.on_launch = hold
    with server.client() as client:
        body = {"prompt": "x:", "max_tokens": 40, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            events = read_events(answer)
            seen = next(events)
            server.wait(lambda: not server.link.gate.is_set())
            server.link.settle()
            known = server.call(lambda: server.service.recent_requests.find("", seen["id"]).choice(0).token_ids)
            results: list[dict[str, Any]] = []
            branch = threading.Thread(target=lambda: results.append(fork(server, seen["id"], at_token=len(known))))
            branch.start()
            server.wait(lambda: len(server.dispatcher.requests()) == 2)
            server.link.gate.set()
            server.link.settle()
            branch.join(PATIENCE)
            rest = "".join(choice["text"] for event in events if event != "[DONE]" for choice in event["choices"])
    assert results[0]["choices"][0]["text"] == STORY[len(known) :]
    assert seen["choices"][0]["text"] + rest == STORY
    assert server.link.submitted[1].source is not None


def test_a_branch_is_streamed_and_ends_when_its_client_leaves(server: TestServer) -> None:
    name = finished(server)
    events = server.events(FORK, {"request_id": name, "at_token": 9, "max_tokens": 40})
    assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == STORY[9:]


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"request_id": "nobody"}, 404, "request_id"),
        ({"index": 5}, 400, "index"),
        ({"at_token": 99}, 400, "at_token"),
        ({"at_token": -1}, 400, "at_token"),
        ({"n": 0}, 400, "n"),
    ],
)
def test_what_cannot_be_forked_is_refused_by_name(
    server: TestServer, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"request_id": finished(server), **fields}
    answer = server.post(FORK, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_nobody_forks_the_request_of_another_key(serve: Serve) -> None:
    server = serve(script, access=AccessConfig(key_digests=digests("ann", "bob")))
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    name = server.post(COMPLETIONS, {"prompt": "x:", "max_tokens": 9}, headers=ann).json()["id"]
    assert server.post(FORK, {"request_id": name}, headers=bob).status_code == 404
    assert server.post(FORK, {"request_id": name}, headers=ann).status_code == 200


def test_the_oldest_answers_are_forgotten(serve: Serve) -> None:
    server = serve(script, limits={"fork_requests": 2})
    names = [finished(server) for _ in range(3)]
    server.wait(lambda: server.call(lambda: server.service.recent_requests.find("", names[0])) is None)
    assert server.post(FORK, {"request_id": names[0]}).status_code == 404
    assert server.post(FORK, {"request_id": names[2]}).status_code == 200


def test_an_answer_that_is_neither_streamed_nor_finished_cannot_be_forked_yet(serve: Serve) -> None:
    server = serve(script)
    server.link.gate.clear()
    body = {"prompt": "x:", "max_tokens": 9, "request_id": "slow"}
    running = threading.Thread(target=lambda: server.post(COMPLETIONS, body))
    running.start()
    server.wait(lambda: server.call(lambda: server.service.recent_requests.find("", "slow")) is not None)
    answer = server.post(FORK, {"request_id": "slow"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    server.link.gate.set()
    server.link.settle()
    running.join(PATIENCE)
