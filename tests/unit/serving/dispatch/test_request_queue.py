"""The queue at the edge: order and bounds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.dispatch.request_queue import QueueOrder, RequestQueue
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

SAMPLING = SamplingParams()


def request(name: str, priority: int = 0, num_tokens: int = 1, tenant: str = "", pin: str = "") -> InFlightRequest:
    loop = asyncio.new_event_loop()
    loop.close()
    submit = Submit(name, (1,) * num_tokens, SAMPLING, priority=priority, tenant=tenant, pin=pin)
    return InFlightRequest(submit, RequestRecord(name, "chat", num_tokens, SAMPLING, False, 0.0), Mailbox(loop, 1))


def leave_all(room: RequestQueue) -> list[str]:
    order = []
    while (first := room.first()) is not None:
        order.append(first.submit.request_id)
        room.remove(first)
    return order


def test_priority_goes_before_arrival() -> None:
    room = RequestQueue(10, 100)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        room.add(request(name, priority))
    assert leave_all(room) == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("by_tenant", [False, True])
def test_what_is_to_stay_resident_goes_before_all(by_tenant: bool) -> None:
    room = RequestQueue(10, 100)
    room.order.by_tenant = by_tenant
    for name, pin in (("first", ""), ("prefix", "system"), ("second", "")):
        room.add(request(name, priority=-5, pin=pin))
    assert leave_all(room) == ["prefix", "first", "second"]


def test_who_has_waited_long_enough_goes_before_the_urgent() -> None:
    now = 0.0
    room = RequestQueue(10, 100, QueueOrder(lambda: now))
    room.order.ageing = 10.0
    room.add(request("low", priority=2))
    now = 19.0
    room.add(request("soon", priority=0))
    now = 21.0
    room.add(request("late", priority=0))
    assert leave_all(room) == ["soon", "low", "late"]


def test_tenants_take_turns_by_prompt_tokens_however_many_one_sends() -> None:
    room = RequestQueue(100, 1_000)
    room.order.by_tenant = True
    for number in range(20):
        room.add(request(f"flood{number}", num_tokens=10, tenant="flood"))
    first = room.first()
    assert first is not None
    room.remove(first)
    for number in range(3):
        room.add(request(f"other{number}", num_tokens=5, tenant="other"))
    order = leave_all(room)
    assert order[:5] == ["other0", "other1", "flood1", "other2", "flood2"]
    assert order[5:] == [f"flood{number}" for number in range(3, 20)]


def test_the_room_is_bounded_in_requests_and_in_tokens() -> None:
    room = RequestQueue(2, 10)
    assert room.has_room(2, 10)
    room.add(request("a", num_tokens=8))
    assert room.has_room(1, 2)
    assert not room.has_room(2, 2)
    assert not room.has_room(1, 3)


def test_a_prompt_longer_than_the_bound_may_wait_alone() -> None:
    room = RequestQueue(2, 10)
    assert room.has_room(1, 50)
    assert room.has_room(3, 3)
    assert not room.has_room(1, 1, elsewhere=(2, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 9), st.integers(0, 3)), max_size=60))
def test_whoever_leaves_in_whatever_order_the_count_is_right(moves: list[tuple[int, int, int]]) -> None:
    room, inside = RequestQueue(1_000, 10_000), []
    for number, (priority, num_tokens, action) in enumerate(moves):
        if action or not inside:
            inside.append(request(str(number), priority, num_tokens))
            room.add(inside[-1])
        else:
            gone = inside.pop(number % len(inside))
            room.remove(gone)
            room.remove(gone)
        room.check()
        assert len(room) == len(inside)
        first = room.first()
        assert first is None or first.submit.priority == min(one.submit.priority for one in inside)


def test_what_waits_elsewhere_counts_against_the_same_bound() -> None:
    room = RequestQueue(10, 100)
    assert room.has_room(4, 10, (6, 0))
    assert not room.has_room(5, 10, (6, 0))
    assert room.has_room(1, 40, (1, 60))
    assert not room.has_room(1, 41, (1, 60))
    assert room.has_room(1, 500)  # nothing waits anywhere
    assert not room.has_room(1, 500, (1, 1))
