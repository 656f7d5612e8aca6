"""What recent requests keep of their answers so that they can be forked, and when they are forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.dispatch.recent_requests import RecentRequest, RecentRequests
from quire.types.output import Finished, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import TOKENIZER

LIMITS = {"fork_requests": 3, "fork_tokens": 100, "fork_seconds": 10}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, num_prompt: int = 2, n: int = 1, *, streams: bool = False, first: int = 0) -> InFlightRequest:
    sampling = SamplingParams(n=n)
    submit = Submit(name, tuple(range(num_prompt)), sampling)
    record = RequestRecord(name, "completions", num_prompt, sampling, streams, 0.0)
    mailbox: Any = SimpleNamespace(put=lambda delta: None, put_bytes=0)
    return InFlightRequest(submit, record, mailbox, first, streams)


def end(memory: RecentRequests, recent: RecentRequest, num_tokens: int = 3) -> None:
    for one in recent.requests:
        samples = tuple(SampleEnd(index, tuple(range(num_tokens)), "stop") for index in range(one.n))
        one.finish(Finished(one.submit.request_id, samples), TOKENIZER)
    memory.end(recent)
    memory.check()


def test_a_request_is_found_by_each_of_its_names_and_by_its_own_client_alone() -> None:
    memory = RecentRequests(LIMITS)
    recent = memory.begin("ann", ["mine", "cmpl-1"], [request("engine-1")])
    assert memory.find("ann", "mine") is memory.find("ann", "cmpl-1") is recent
    assert memory.find("bob", "mine") is None
    assert memory.find("ann", "yours") is None


def test_tokens_of_a_running_request_are_known_where_it_is_followed() -> None:
    memory = RecentRequests(LIMITS)
    quiet, streamed = request("q", n=2), request("s", n=2, streams=True, first=2)
    recent = memory.begin("", ["a"], [quiet, streamed])
    streamed.follow(TOKENIZER, 0)[1].push(7, None)
    assert recent.num_choices == 4
    assert [recent.choice(place).token_ids for place in range(4)] == [None, None, (), (7,)]  # type: ignore[union-attr]
    assert recent.choice(4) is None
    end(memory, recent)
    assert [recent.choice(place).token_ids for place in range(4)] == [(0, 1, 2)] * 4  # type: ignore[union-attr]
    assert [recent.choice(place).index for place in range(4)] == [0, 1, 0, 1]  # type: ignore[union-attr]


def test_a_request_that_was_cut_off_keeps_what_was_seen_of_it() -> None:
    memory = RecentRequests(LIMITS)
    streamed = request("s", streams=True)
    recent = memory.begin("", ["a"], [streamed])
    streamed.follow(TOKENIZER, 0)[0].push(7, None)
    memory.end(recent)
    choice = recent.choice(0)
    assert choice is not None
    assert choice.token_ids == (7,)


def test_the_oldest_are_forgotten_beyond_their_number_their_tokens_and_their_time() -> None:
    clock = Clock()
    memory = RecentRequests(LIMITS, clock)
    for name in "abcd":
        end(memory, memory.begin("", [name], [request(name)]))
    assert [memory.find("", name) is None for name in "abcd"] == [True, False, False, False]
    end(memory, memory.begin("", ["large"], [request("large", num_prompt=92)]))
    assert [memory.find("", name) is None for name in ("b", "c", "d", "large")] == [True, True, False, False]
    clock.now = 11.0
    assert memory.find("", "large") is None
    end(memory, memory.begin("", ["new"], [request("new")]))
    assert memory.find("", "new") is not None


def test_a_name_that_is_used_again_means_the_new_request_and_outlives_the_old() -> None:
    memory = RecentRequests({**LIMITS, "fork_requests": 1})
    old = memory.begin("", ["same"], [request("1")])
    new = memory.begin("", ["same"], [request("2")])
    end(memory, old)
    end(memory, new)
    assert memory.find("", "same") is new
