"""The waiting room: order and bounds."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serving.desk.mailbox import Mailbox
from quire.serving.desk.observer import RequestRecord
from quire.serving.desk.ticket import Ticket
from quire.serving.desk.waiting_room import WaitingRoom
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

SAMPLING = SamplingParams()


def ticket(name: str, priority: int = 0, num_tokens: int = 1) -> Ticket:
    loop = asyncio.new_event_loop()
    loop.close()
    submit = Submit(name, (1,) * num_tokens, SAMPLING, priority=priority)
    return Ticket(submit, RequestRecord(name, "chat", num_tokens, SAMPLING, False, 0.0), Mailbox(loop, 1))


def test_priority_goes_before_arrival() -> None:
    room = WaitingRoom(10, 100)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        room.add(ticket(name, priority))
    order = []
    while (first := room.first()) is not None:
        order.append(first.submit.request_id)
        room.remove(first)
    assert order == ["urgent", "first", "second", "late"]


def test_the_room_is_bounded_in_requests_and_in_tokens() -> None:
    room = WaitingRoom(2, 10)
    assert room.has_room(2, 10)
    assert not room.has_room(3, 3)
    room.add(ticket("a", num_tokens=8))
    assert room.has_room(1, 2)
    assert not room.has_room(1, 3)


def test_a_prompt_longer_than_the_bound_may_wait_alone() -> None:
    room = WaitingRoom(2, 10)
    assert room.has_room(1, 50)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 9), st.integers(0, 3)), max_size=60))
def test_whoever_leaves_in_whatever_order_the_count_is_right(moves: list[tuple[int, int, int]]) -> None:
    room, inside = WaitingRoom(1_000, 10_000), []
    for number, (priority, num_tokens, action) in enumerate(moves):
        if action or not inside:
            inside.append(ticket(str(number), priority, num_tokens))
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
    room = WaitingRoom(10, 100)
    assert room.has_room(4, 10, (6, 0))
    assert not room.has_room(5, 10, (6, 0))
    assert room.has_room(1, 40, (1, 60))
    assert not room.has_room(1, 41, (1, 60))
    assert room.has_room(1, 500)  # nothing waits anywhere
    assert not room.has_room(1, 500, (1, 1))
