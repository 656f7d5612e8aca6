"""The limits table, entry by entry, and connections that dawdle."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from http_server import PATIENCE, TestServer
from quire.serving.http.limits import LIMITS
from tests.http.conftest import Serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PART = {"type": "text", "text": "x"}
USER = {"role": "user", "content": "x"}

# limit name: (endpoint, the parameter at fault, a body that is `size` large in what the limit bounds)
OVER: dict[str, tuple[str, str, Callable[[int], dict[str, Any]]]] = {
    "nesting": (CHAT, "body", lambda size: {"messages": [USER], "x": _nested(size)}),
    "prompts": (COMPLETIONS, "prompt", lambda size: {"prompt": ["x"] * size}),
    "prompt_tokens": (COMPLETIONS, "prompt", lambda size: {"prompt": [1] * size}),
    "prompt_characters": (COMPLETIONS, "prompt", lambda size: {"prompt": "x" * size}),
    "messages": (CHAT, "messages", lambda size: {"messages": [USER] * size}),
    "content_parts": (
        CHAT,
        "messages[0].content",
        lambda size: {"messages": [{"role": "user", "content": [PART] * size}]},
    ),
    "tools": (CHAT, "tools", lambda size: {"messages": [USER], "tools": _tools(size)}),
    "n": (COMPLETIONS, "n", lambda size: {"prompt": "x", "n": size}),
    "choices": (COMPLETIONS, "n", lambda size: {"prompt": ["x"] * size}),
    "max_tokens": (COMPLETIONS, "max_tokens", lambda size: {"prompt": "x", "max_tokens": size}),
    "logprobs": (COMPLETIONS, "logprobs", lambda size: {"prompt": "x", "logprobs": size}),
    "stop_strings": (COMPLETIONS, "stop", lambda size: {"prompt": "x", "stop": ["s"] * size}),
    "stop_characters": (COMPLETIONS, "stop[0]", lambda size: {"prompt": "x", "stop": "s" * size}),
    "stop_tokens": (COMPLETIONS, "stop_token_ids", lambda size: {"prompt": "x", "stop_token_ids": [1] * size}),
    "bad_words": (COMPLETIONS, "bad_words", lambda size: {"prompt": "x", "bad_words": ["s"] * size}),
    "logit_bias": (
        COMPLETIONS,
        "logit_bias",
        lambda size: {"prompt": "x", "logit_bias": dict.fromkeys(_names(size), 1)},
    ),
    "pattern_tokens": (
        COMPLETIONS,
        "repetition_detection.max_pattern_size",
        lambda size: {"prompt": "x", "repetition_detection": {"max_pattern_size": size}},
    ),
    "token_ids": (COMPLETIONS, "allowed_token_ids", lambda size: {"prompt": "x", "allowed_token_ids": [1] * size}),
    "logprob_token_ids": (
        COMPLETIONS,
        "logprob_token_ids",
        lambda size: {"prompt": "x", "logprob_token_ids": [1] * size},
    ),
    "template_kwargs": (
        CHAT,
        "chat_template_kwargs",
        lambda size: {"messages": [USER], "chat_template_kwargs": {f"a{name}": 1 for name in _names(size)}},
    ),
    "metadata": (
        "/v1/responses",
        "metadata",
        lambda size: {"input": "x", "metadata": dict.fromkeys(_names(size), "v")},
    ),
    "identifier": (COMPLETIONS, "request_id", lambda size: {"prompt": "x", "request_id": "r" * size}),
    "label": (COMPLETIONS, "cache_salt", lambda size: {"prompt": "x", "cache_salt": "u" * size}),
}
ELSEWHERE = {
    *("image_bytes", "image_pixels", "images_pixels", "images_bytes"),  # test_images.py
    "inputs",  # test_embeddings.py
    "body_bytes", "queue_requests", "queue_tokens", "bodies_bytes", "stream_bytes", "connections", "header_bytes",
    "header_seconds", "body_seconds", "idle_seconds", "stall_seconds", "ping_seconds",
    "coalesce_streams", "coalesce_ms", "fork_requests", "fork_tokens", "fork_seconds", "quarantine_seconds",
    "stored_responses", "stored_response_bytes",
    "file_bytes", "files", "files_bytes", "batches", "batch_lines", "batch_requests",
}  # fmt: skip


def _names(size: int) -> list[str]:
    return [str(number) for number in range(size)]


def _tools(size: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{name}"}} for name in _names(size)]


def _nested(size: int) -> Any:
    value: Any = 1
    for _ in range(size - 1):  # the body itself is the first level
        value = [value]
    return value


def test_every_limit_is_tested() -> None:
    assert {limit.name for limit in LIMITS} == set(OVER) | ELSEWHERE


@pytest.mark.parametrize("name", OVER)
def test_one_more_than_a_limit_is_refused_by_name(server: TestServer, serve: Serve, name: str) -> None:
    limit = next(limit for limit in LIMITS if limit.name == name)
    path, param, body = OVER[name]
    size = limit.value
    if name in ("prompt_tokens", "prompt_characters", "max_tokens", "token_ids", "choices", "messages"):
        size, server = 5, serve(limits={name: 5})
    answer = server.post(path, body(size + 1))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert str(size) in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", OVER)
def test_a_limit_itself_is_not_over_the_limit(serve: Serve, name: str) -> None:
    path, _, body = OVER[name]
    answer = serve(limits={name: 3}).post(path, body(3))
    if answer.status_code == 400:  # for another reason: unknown variables, a vocabulary, a missing member
        assert "limit" not in answer.json()["error"]["message"]
        assert "[1, 3]" not in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


def test_a_header_with_a_longer_id_is_cut_at_the_limit_as_the_table_says(serve: Serve) -> None:
    server = serve(limits={"identifier": 5})
    answer = server.get("/v1/models", headers={"X-Request-Id": "abcdefgh"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "abcde")
    (limit,) = [limit for limit in LIMITS if limit.name == "identifier"]
    assert limit.bounds == "`request_id`; a longer X-Request-Id header is cut"


def test_a_body_that_is_too_large_is_refused_while_it_comes(serve: Serve) -> None:
    server = serve(limits={"body_bytes": 1_000})
    assert server.post(COMPLETIONS, {"prompt": "x" * 2_000}).status_code == 413

    def parts() -> Any:
        for _ in range(50):
            yield b" " * 100

    with server.client() as client:
        answer = client.post(COMPLETIONS, content=parts(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert server.get("/health").status_code == 200


def test_bodies_that_do_not_come_keep_nobody_out(serve: Serve) -> None:
    server = serve(limits={"queue_requests": 1, "bodies_bytes": 500})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server)).sendall(head + b"Content-Length: 400\r\n\r\n{")
        server.wait(lambda: server.service.bodies.num_bytes == 20)
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_bodies_together_are_bounded(serve: Serve) -> None:
    server = serve(limits={"bodies_bytes": 100_000})
    answer = server.post(COMPLETIONS, {"prompt": "x" * 200_000})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/files", b"multipart/form-data; boundary=b"), (COMPLETIONS, b"application/json")]
)
def test_large_bodies_that_come_slowly_keep_small_ones_not_out(serve: Serve, path: str, kind: bytes) -> None:
    server = serve(limits={"bodies_bytes": 200_000})
    head = b"POST " + path.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: " + kind
    pools = (server.service.bodies, server.service.uploads)
    with ExitStack() as stack:
        for _ in range(2):
            slow = stack.enter_context(connect(server))
            slow.sendall(head + b"\r\nContent-Length: 100001\r\n\r\n" + b" " * 100_000)
        server.wait(lambda: sum(pool.num_bytes for pool in pools) == 200_000)
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        large = server.post(COMPLETIONS, {"prompt": "x", "user": "x" * 90_000})
        assert large.status_code == (429 if path == COMPLETIONS else 200)  # an upload keeps no other request out
    server.wait(lambda: all(pool.num_bytes == 0 for pool in pools))


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"null", b"[]", b'"x"', b"{", b'{"prompt":"x"}}', b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":Infinity}', b'{"prompt":"x","temperature":-Infinity}',
        b'{"prompt":"x","temperature":1e999}', b'{"prompt":"x","seed":18446744073709551616}',
        b'{"prompt":"x","seed":-9999999999999999999999}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\udfff x"}',
        b'{"prompt":"\xff"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":""}', b'{"prompt":[]}', b'{"prompt":[[]]}',
        b'{"prompt":["x",""]}', b'{"prompt":["x",1]}', b'{"prompt":[1,"x"]}', b'{"prompt":{}}', b'{"prompt":true}',
        b'{"prompt":[true]}', b'{"prompt":[-1]}', b'{"prompt":[1.5]}', b'{"prompt":[4294967296]}',
        b'{"prompt":"x","n":0}',
        b'{"prompt":"x","n":true}', b'{"prompt":"x","n":"1"}', b'{"prompt":"x","n":1.5}', b'{"prompt":"x","stop":[5]}',
        b'{"prompt":"x","logit_bias":{"a":1}}', b'{"prompt":"x","logit_bias":{"1":1e6}}', b'{"prompt":"x","top_p":0}',
        b'{"prompt":"x","logit_bias":[]}', b"\xef\xbb\xbf{}", b"{}", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt":"x","stream":1}', b"{'prompt':'x'}", b'{"prompt":"x",}', b'{"prompt":"x"/**/}', b'{"prompt":01}',
    ],
)  # fmt: skip
def test_what_is_no_request_is_a_bad_request(server: TestServer, body: bytes) -> None:
    with server.client() as client:
        answer = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


# ------------------------------------------------------------------------------------------------ connections
def connect(server: TestServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(65_536) == b""
    except ConnectionResetError:
        return True


def test_a_head_that_never_ends_is_cut_off(serve: Serve) -> None:
    server = serve(limits={"header_seconds": 1})
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert is_closed(connection)


def test_a_body_that_never_ends_is_answered_and_cut_off(serve: Serve) -> None:
    server = serve(limits={"body_seconds": 1})
    with connect(server) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer or b"body_timeout" in connection.recv(65_536)
        assert is_closed(connection)


def test_an_idle_connection_is_closed(serve: Serve) -> None:
    server = serve(limits={"idle_seconds": 3})
    with connect(server) as silent, connect(server) as used:
        used.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert used.recv(65_536).startswith(b"HTTP/1.1 200 ")
        rest = used.recv(65_536)
        assert rest == b"" or is_closed(used)
        assert is_closed(silent)


def test_a_head_that_is_too_large_is_refused(serve: Serve) -> None:
    server = serve(limits={"header_bytes": 2_000})
    for head in (b"GET /health HTTP/1.1\r\nX: " + b"a" * 3_000, b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1_000):
        with connect(server) as connection:
            connection.sendall(head + b"\r\n")
            connection.sendall(b"Z: " + b"b" * 3_000 + b"\r\n\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 431 ")
    assert server.get("/health").status_code == 200


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
)


@pytest.mark.parametrize("trailers", [b"X: y\r\n" * 20_000, b"X: " + b"y" * 120_000])
def test_trailers_without_end_close_the_connection(serve: Serve, trailers: bytes) -> None:
    server = serve(limits={"header_bytes": 2_000})
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"\r\n\r\n2\r\n{}\r\n0\r\n")
        with suppress(ConnectionError):
            for start in range(0, len(trailers), 4_096):
                connection.sendall(trailers[start : start + 4_096])
        assert is_closed(connection)
    assert server.get("/health").status_code == 200


def test_a_trailer_is_no_header(server: TestServer) -> None:
    body = b'{"prompt":"x"}'
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\nX-Request-Id: late\r\n\r\n")
        answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"late" not in answer


def test_connections_over_the_cap_are_told_and_closed(serve: Serve) -> None:
    server = serve(limits={"connections": 2})
    with connect(server) as first, connect(server) as second:
        for connection in (first, second):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        with connect(server) as third:
            answer = third.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in answer
    server.wait(lambda: server.get("/health").status_code == 200)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x01\x02\r\n\r\n", b"HELLO\r\n\r\n", b"GET  /health HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"],
)
def test_what_is_not_http_is_refused_in_openais_shape(server: TestServer, garbage: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(garbage)
        answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_request_error"' in answer


def test_a_second_request_before_the_first_answer_closes_the_connection_with_that_answer(server: TestServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(request + request)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert b"connection: close" in answer
