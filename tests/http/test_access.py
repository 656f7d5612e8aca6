"""Who may come in, and what those who may not are told."""

from __future__ import annotations

import io
import logging
import socket
from typing import Any

import pytest

from http_server import TestServer, digests
from observers import NullObserver
from quire.config.server import AccessConfig
from quire.observability.logging import set_up_logging
from tests.http.conftest import Serve

KEY, ADMIN = "sk-user", "sk-admin"
LOCKED = AccessConfig(key_digests=digests(KEY, "sk-second"), admin_digests=digests(ADMIN))
GETS = [
    "/v1/models",
    "/v1/models/scripted",
    "/v1/capabilities",
    "/version",
    "/metrics",
    "/openapi.json",
    "/nope",
    "/docs",
]
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
ADMIN_GETS = ["/admin/stats", "/admin/requests", "/admin/prefixes"]
ADMIN_POSTS = ["/admin/drain", "/admin/abort", "/admin/reset_cache", "/admin/prefixes"]
PUBLIC = ["/health", "/ready", "/", "/playground/index.html"]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@pytest.fixture(scope="module")
def locked() -> Any:
    server = TestServer(lambda prompt, index: " ok", access=LOCKED)
    yield server
    server.close()


def raw(server: TestServer, request: bytes) -> bytes:
    """The status line and body of the answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
        return answer


@pytest.mark.parametrize("path", [*GETS, *POSTS, *ADMIN_GETS, *ADMIN_POSTS])
def test_without_a_key_every_method_on_every_path_is_refused(locked: TestServer, path: str) -> None:
    with locked.client() as client:
        for method in METHODS:
            for key in (None, "", "wrong", KEY[:-1], KEY + "x", KEY.upper()):
                headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
                assert client.request(method, path, headers=headers).status_code == 401, (method, key)


@pytest.mark.parametrize("path", PUBLIC)
def test_liveness_and_the_playground_need_no_key(locked: TestServer, path: str) -> None:
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        b"//health", b"/health/", b"/health/../v1/models", b"/%68ealth", b"/health%2f..%2fv1%2fmodels",
        b"/v1/models?/health",
        b"/v1/models#/health", b"/health;/v1/models", b"/HEALTH", b"/%2e%2e/v1/models", b"/v1%2fmodels", b"/\\health",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_around_the_key(locked: TestServer, target: bytes) -> None:
    answer = raw(locked, b"GET " + target + b" HTTP/1.1\r\nHost: health\r\n\r\n")
    assert answer.split(b" ")[1] in (b"401", b"400"), answer


@pytest.mark.parametrize(
    "headers",
    [b"Host: /health", b"X-Original-URL: /health", b"X-Forwarded-Path: /health", b"X-HTTP-Method-Override: GET"],
)
def test_no_header_gets_around_the_key(locked: TestServer, headers: bytes) -> None:
    answer = raw(locked, b"GET /v1/models HTTP/1.1\r\n" + headers + b"\r\n\r\n")
    assert b" 401 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize("key", [KEY, "sk-second"])
def test_any_of_the_keys_opens_the_api_and_no_admin_route(locked: TestServer, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert locked.get("/v1/models", headers=headers).status_code == 200
    assert locked.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 200
    assert locked.get("/nope", headers=headers).status_code == 404
    for path in ADMIN_GETS:
        assert locked.get(path, headers=headers).status_code == 401


def test_an_admin_key_opens_the_admin_routes_only(locked: TestServer) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert locked.get("/admin/stats", headers=headers).status_code == 200
    assert locked.get("/v1/models", headers=headers).status_code == 401


def test_without_an_admin_key_there_are_no_admin_routes(server: TestServer) -> None:
    for path in [*ADMIN_GETS, *ADMIN_POSTS]:
        assert server.get(path).status_code == 404


def test_other_schemes_than_bearer_are_refused(locked: TestServer) -> None:
    for value in (KEY, f"Basic {KEY}", f"Bearer{KEY}", f"Token {KEY}"):
        assert locked.get("/v1/models", headers={"Authorization": value}).status_code == 401
    assert locked.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200


def test_metrics_may_be_open(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests(KEY), metrics_need_key=False))
    assert server.get("/metrics").status_code == 200
    assert server.get("/version").status_code == 401


def test_a_server_without_keys_answers_only_to_its_own_name(server: TestServer) -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 421, host


def test_a_server_with_keys_answers_to_any_name(locked: TestServer) -> None:
    headers = {"Host": "models.example", "Authorization": f"Bearer {KEY}"}
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_other_sites_may_not_read_answers_unless_configured(server: TestServer, serve: Serve) -> None:
    origin = {"Origin": "https://app.example"}
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=origin).headers
    access = AccessConfig(cors_origins=("https://app.example",), key_digests=digests(KEY))
    open_to_one = serve(access=access)
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with open_to_one.client() as client:
        allowed = client.options("/v1/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.options("/v1/completions", headers={**preflight, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers
        plain = client.get("/v1/models", headers={**origin, "Authorization": f"Bearer {KEY}"})
        assert plain.headers["access-control-allow-origin"] == "https://app.example"


def test_a_form_of_another_site_cannot_post(server: TestServer) -> None:
    with server.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = client.post("/v1/completions", content=b'{"prompt":"x"}', headers={"Content-Type": kind})
            assert answer.status_code == 415, kind


def test_unknown_paths_and_methods_are_told_in_openais_shape(server: TestServer) -> None:
    with server.client() as client:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("OPTIONS", "/health", 405),
            ("GET", "/health/x", 404),
            ("GET", "/v1/models/nope", 404),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status, path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_wrong_method_is_told_the_right_ones(server: TestServer) -> None:
    with server.client() as client:
        for method, path, allowed in (
            ("GET", "/v1/completions", ["POST"]),
            ("PUT", "/v1/models/", ["GET"]),
            ("DELETE", "/v1/files", ["GET", "POST"]),
        ):
            answer = client.request(method, path)
            assert answer.status_code == 405
            assert sorted(answer.headers["allow"].split(", ")) == allowed
            message = answer.json()["error"]["message"]
            assert message.endswith(f", not {method}")
            assert all(name in message for name in allowed)


def test_head_answers_like_get_without_a_body(server: TestServer) -> None:
    with server.client() as client:
        answer = client.head("/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


def test_answers_do_not_name_the_software(server: TestServer) -> None:
    assert "server" not in server.get("/health").headers


def test_the_playground_is_served_with_a_strict_policy_and_revalidated(server: TestServer, serve: Serve) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert server.get("/", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    bare = serve(access=AccessConfig(playground=False))
    assert (bare.get("/").text, bare.get("/playground/").status_code) == ("Quire is running", 404)


def test_an_unforeseen_exception_is_an_error_without_details(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()

    def break_it(*args: object) -> None:
        raise RuntimeError("secret /etc/passwd at 0xdeadbeef")

    server.service.texts.maker = break_it  # type: ignore[method-assign]
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "secret" in caplog.text
    assert server.get("/health").status_code == 200


def test_noise_on_the_port_does_not_fill_the_log(serve: Serve) -> None:
    server, log = serve(), io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up_logging("info", "text", "edge 1", log)
        for number in range(60):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                if number % 2:
                    connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                else:
                    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                    connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
                assert connection.recv(4_096).startswith(b"HTTP/1.1 ")
    finally:
        root.handlers, root.level = handlers, level
    lines = log.getvalue().splitlines()
    assert 0 < len(lines) <= 20, lines[:30]
    assert any("left out" in line for line in lines)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_that_asks_for_an_upgrade_is_answered_with_its_body_read(serve: Serve, is_chunked: bool) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    framing, sent = b"Content-Length: %d\r\n" % len(body), body
    if is_chunked:
        framing, sent = b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", serve().port), timeout=120) as connection:
        for _ in range(2):  # and the connection goes on
            connection.sendall(head + upgrade + framing + b"\r\n" + sent[:4])
            connection.sendall(sent[4:])
            answer = connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert b"text_completion" in answer


def test_errors_of_the_guard_the_router_and_the_connection_are_counted(serve: Serve) -> None:
    class Counting(NullObserver):
        def __init__(self) -> None:
            self.seen: list[tuple[int, str]] = []

        def http_error(self, status: int, field: str) -> None:
            self.seen.append((status, field))

    counting = Counting()
    server = serve(observer=counting, access=LOCKED, limits={"header_bytes": 1_000})
    headers = {"Authorization": f"Bearer {KEY}"}
    assert server.get("/v1/models").status_code == 401
    assert server.get("/nowhere", headers=headers).status_code == 404
    assert server.post("/v1/completions", {"prompt": "x", "top_p": 7}, headers=headers).status_code == 400
    assert (
        server.post("/v1/completions", {"prompt": "x", "strange_field": 7, "n": "?"}, headers=headers).status_code
        == 400
    )
    assert raw(server, b"NONSENSE\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 2_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    server.wait(lambda: len(counting.seen) == 6)
    assert counting.seen[:3] == [(401, ""), (404, ""), (400, "top_p")]
    assert counting.seen[3] in [(400, "other"), (400, "n")]  # an unknown field is never a label
    assert counting.seen[4:] == [(400, ""), (431, "")]


EVIL, PAGE = {"Origin": "https://evil.example"}, {"Origin": "https://app.example"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        (EVIL, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another program of the same machine
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({**EVIL, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**EVIL, "Sec-Fetch-Site": "same-site"}, 403),
        ({**EVIL, "Sec-Fetch-Site": "same-origin"}, 200),  # behind a proxy that changes Host
        ({"Sec-Fetch-Site": "none"}, 200),
        (PAGE, 200),
        ({**PAGE, "Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
def test_without_keys_a_page_of_another_site_changes_nothing(serve: Serve, headers: Any, status: int) -> None:
    server = serve(access=AccessConfig(cors_origins=("https://app.example",)))
    with server.client(headers=headers) as client:
        sent = client.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
        assert sent.status_code == status
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == status
        assert client.delete("/v1/files/none").status_code == (404 if status == 200 else 403)
        assert client.get("/v1/models").status_code == 200
    if status == 403:
        assert sent.json()["error"]["code"] == "cross_site"
        assert server.get("/v1/files").json()["data"] == []


def test_the_servers_own_pages_and_holders_of_keys_may_call(serve: Serve) -> None:
    server = serve()
    assert server.post("/v1/completions", {"prompt": "x"}, headers={"Origin": server.url}).status_code == 200
    keyed = serve(access=AccessConfig(key_digests=digests(KEY)))
    headers = {**EVIL, "Sec-Fetch-Site": "cross-site", "Authorization": f"Bearer {KEY}"}
    assert keyed.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 200
