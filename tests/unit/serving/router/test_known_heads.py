"""Which heads of requests are parsed once, and which are not kept."""

from __future__ import annotations

import pytest

from quire.serving.router.known_heads import MAX_HEAD_BYTES, MAX_HEADS, Head, KnownHeads, WholeRequest, split_request

LINES = (b"POST /v1/completions HTTP/1.1", b"Host: a", b"content-length: 2", b"x-last: 1")


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
    heads, head = KnownHeads(), parsed(*LINES[:2], name + b"2", *last)
    heads.keep(first, head)
    assert heads.find(second.key) is head


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
    heads = KnownHeads()
    heads.keep(split(request(*sent)), parsed(*read))
    assert len(heads) == 0


def test_the_heads_that_were_used_last_are_kept() -> None:
    heads = KnownHeads()
    some = [(*LINES, b"x-number: %d" % number) for number in range(MAX_HEADS + 1)]
    for lines in some[:-1]:
        heads.keep(split(request(*lines)), parsed(*lines))
    assert heads.find(split(request(*some[0])).key) is not None
    heads.keep(split(request(*some[-1])), parsed(*some[-1]))
    assert len(heads) == MAX_HEADS
    assert [heads.find(split(request(*some[number])).key) is None for number in (0, 1, 2, -1)] == [
        False, True, False, False,
    ]  # fmt: skip
