"""Which heads of requests are parsed once, and which are not kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from quire.serving.router.known_heads import MAX_HEAD_BYTES, MAX_HEADS, Head, KnownHeads, WholeRequest, split_request

LINES = (b"POST /v1/completions HTTP/1.1", b"Host: a", b"content-length: 2", b"x-last: 1")


class Clock:
    """The part of an event loop that heads need, whose time is set."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, call: Callable[..., object], *arguments: object) -> object:
        return self.call_at(self._now + seconds, call, *arguments)

    def call_at(self, when: float, call: Callable[..., object], *arguments: object) -> object:
        self._calls.append((when, partial(call, *arguments)))
        return self._calls[-1]

    def pass_to(self, now: float) -> None:
        while due := [each for each in self._calls if each[0] <= now]:
            first = min(due, key=lambda each: each[0])
            self._calls.remove(first)
            self._now = first[0]
            first[1]()
        self._now = now


def make_clock() -> Any:
    return Clock()


def request(*lines: bytes, body: bytes = b"{}") -> bytes:
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def parsed(*lines: bytes) -> Head:
    """As the parser reads these lines."""
    pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines[1:])]
    return Head("POST", b"/v1/completions", "/v1/completions", pairs, dict(pairs), True, True, 1_000)


def split(data: bytes) -> WholeRequest:
    found = split_request(data)
    assert found is not None
    return found


@pytest.mark.parametrize("name", [b"content-length: ", b"Content-Length: "])
@pytest.mark.parametrize("last", [(), (b"x-last: 1",)])
def test_requests_that_differ_in_their_bodies_have_the_same_key(name: bytes, last: tuple[bytes, ...]) -> None:
    first = split(request(*LINES[:2], name + b"2", *last))
    second = split(request(*LINES[:2], name + b"12", *last, body=b'{"prompt":1}'))
    assert first.key == second.key
    assert (first.body, second.body) == (b"{}", b'{"prompt":1}')
    heads, head = KnownHeads(60), parsed(*LINES[:2], name + b"2", *last)
    heads.keep(first, head, make_clock())
    assert heads.find(second.key, 0) is head


@pytest.mark.parametrize(
    "data",
    [
        request(*LINES)[:-1],  # more of the body is to come
        request(*LINES) + b"P",  # the next request
        request(*LINES[:2]),  # no length
        request(*LINES[:2], b"content-length: 2 "),
        request(*LINES[:2], b"content-length: +2"),
        request(*LINES[:2], b"content-length: 2,2"),
        request(*LINES[:2], b"content-length: " + b"2".rjust(16, b"0")),
        request(*LINES[:2], b"content-length: \xb2"),
        request(*LINES, b"x: " + b"x" * MAX_HEAD_BYTES),
        b"\r\n".join(LINES),
        b"",
    ],
)
def test_what_is_no_whole_request_with_a_plain_length_is_left_to_the_parser(data: bytes) -> None:
    assert split_request(data) is None


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ((*LINES, b"content-length: 2"), (*LINES, b"content-length: 2")),
        ((*LINES, b"Content-length: 7"), (*LINES, b"Content-length: 7")),
        ((*LINES, b"Transfer-Encoding: chunked"), (*LINES, b"Transfer-Encoding: chunked")),
        ((*LINES, b"expect: 100-continue"), (*LINES, b"expect: 100-continue")),
        ((*LINES, b"upgrade: h2c"), (*LINES, b"upgrade: h2c")),
        ((*LINES[:3], b"x-last: 1\n\nGET / HTTP/1.1"), LINES),  # a parser that ends lines and heads at \n alone
        ((*LINES[:3], b"x-last: 1\nx: 2"), LINES),
        ((*LINES, b" folded"), LINES),
        (LINES, (*LINES[:2], b"content-length: 3", LINES[3])),
    ],
)
def test_a_head_that_could_be_read_in_another_way_is_not_kept(sent: tuple[bytes, ...], read: tuple[bytes, ...]) -> None:
    heads = KnownHeads(60)
    heads.keep(split(request(*sent)), parsed(*read), make_clock())
    assert len(heads) == 0


def test_the_heads_that_were_used_last_are_kept() -> None:
    heads, clock = KnownHeads(60), make_clock()
    some = [(*LINES, b"x-number: %d" % number) for number in range(MAX_HEADS + 1)]
    for lines in some[:-1]:
        heads.keep(split(request(*lines)), parsed(*lines), clock)
    assert heads.find(split(request(*some[0])).key, 0) is not None
    heads.keep(split(request(*some[-1])), parsed(*some[-1]), clock)
    assert len(heads) == MAX_HEADS
    assert [heads.find(split(request(*some[number])).key, 0) is None for number in (0, 1, 2, -1)] == [
        False, True, False, False,
    ]  # fmt: skip


def test_a_head_that_is_not_used_is_dropped_in_time_and_one_that_is_used_stays() -> None:
    heads, clock = KnownHeads(60), make_clock()
    left, used = LINES, (*LINES, b"x-number: 1")
    for lines in (left, used):
        heads.keep(split(request(*lines)), parsed(*lines), clock)
    key = split(request(*used)).key
    clock.pass_to(50)
    assert heads.find(key, 50) is not None
    clock.pass_to(59)
    assert len(heads) == 2
    clock.pass_to(60)
    assert len(heads) == 1
    clock.pass_to(109)
    assert len(heads) == 1
    clock.pass_to(110)
    assert len(heads) == 0
    heads.keep(split(request(*left)), parsed(*left), clock)
    clock.pass_to(170)
    assert len(heads) == 0
