"""The order in which requests of a dead engine enter the next one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.retries import RetryQueue
from quire.serving.process.edge_loads import EdgeLoadTable


class Request:
    weight = 3

    def __init__(self, *, has_started: bool = False) -> None:
        self.has_started = has_started


def make(*, has_started: bool = False) -> InFlightRequest:
    return cast("InFlightRequest", Request(has_started=has_started))


def test_requests_without_a_token_are_tried_one_at_a_time_and_before_the_others() -> None:
    queue, started, first, second = RetryQueue(EdgeLoadTable()), make(has_started=True), make(), make()
    for request in (started, first, second):
        queue.add(request)
    assert (len(queue), queue.num_tokens) == (3, 9)
    assert queue.first() is first
    queue.start(first)
    assert queue.first() is None
    queue.remove(first)  # it has a token
    assert queue.first() is second
    queue.start(second)
    queue.remove(second)
    assert queue.first() is started
    queue.start(started)
    assert queue.tried is None
    assert queue.first() is None
    assert len(queue) == 0


def test_the_tried_request_alone_is_the_suspect_of_a_crash() -> None:
    queue, tried, beside = RetryQueue(EdgeLoadTable()), make(), make()
    assert queue.suspects([tried, beside]) == [tried, beside]
    queue.add(tried)
    queue.start(tried)
    assert queue.suspects([tried, beside]) == [tried]


def test_all_edges_together_try_one_request(tmp_path: Path) -> None:
    tables = [EdgeLoadTable(tmp_path / "loads", num_seats=2, seat=seat, edge=seat + 1) for seat in range(2)]
    queue, mine, started = RetryQueue(tables[0]), make(), make(has_started=True)
    queue.add(started)
    tables[1].put(0, 0, 1, 1, retrying=True)
    assert queue.is_trying
    assert queue.first() is None  # not beside the request that the other edge tries
    queue.add(mine)
    assert queue.first() is None
    assert queue.suspects([make()]) == []  # another edge's request is to blame
    tables[1].put(0, 0, 1, 1)
    assert queue.first() is mine
