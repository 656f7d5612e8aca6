"""The ingress of the Ray Serve application, with an engine that does what a test says. It needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.serving.router import ray_serve
from quire.serving.router.ray_serve import MAX_WAITING, Ingress, _Pieces

Answer = Callable[[int], Exception | None]


class StubEngine:
    """Answers 200, or fails as a test says, by the number of the attempt."""

    def __init__(self, fail: Answer) -> None:
        self._fail, self.asked = fail, list[dict[str, Any]]()

    def options(self, **_: object) -> StubEngine:
        return self

    async def remote(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        self.asked.append(asked)
        if (failure := self._fail(len(self.asked))) is not None:
            raise failure
        yield 200, [(b"content-type", b"text/plain")]
        yield b"done"


class BackPressureError(Exception):
    """Named like Ray Serve's."""


def request(method: str, path: str, *pieces: bytes) -> Any:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    url, headers = SimpleNamespace(path=path, query=""), SimpleNamespace(raw=[(b"Content-Type", b"text/x")])
    return SimpleNamespace(method=method, url=url, headers=headers, stream=stream)


def dies_first(attempt: int) -> Exception | None:
    return RuntimeError("gone") if attempt == 1 else None


@pytest.mark.parametrize(
    ("method", "path", "attempts", "status"),
    [
        ("POST", "/v1/completions", 2, 200),
        ("GET", "/v1/files/1", 2, 200),
        ("POST", "/v1/files", 1, 503),
        ("POST", "/v1/batches", 1, 503),
        ("DELETE", "/v1/files/1", 1, 503),
        ("POST", "/admin/drain", 1, 503),
    ],
)
def test_a_request_that_may_have_changed_something_is_not_sent_twice(
    method: str, path: str, attempts: int, status: int
) -> None:
    engine = StubEngine(dies_first)
    answer = asyncio.run(Ingress(engine)(request(method, path, b"ab", b"cd")))
    assert (len(engine.asked), answer.status_code) == (attempts, status)
    assert {asked["body"] for asked in engine.asked} == {b"abcd"}


def test_a_full_queue_is_told_at_once() -> None:
    engine = StubEngine(lambda _: BackPressureError())
    answer = asyncio.run(Ingress(engine)(request("POST", "/v1/completions", b"{}")))
    assert (len(engine.asked), answer.status_code, answer.headers["retry-after"]) == (1, 503, "1")


def test_bodies_are_bounded_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "MAX_BODY_BYTES", 6)
    monkeypatch.setattr(ray_serve, "MAX_BODIES_BYTES", 8)
    engine = StubEngine(lambda _: None)
    ingress = Ingress(engine)
    assert asyncio.run(ingress(request("POST", "/x", b"1234", b"567"))).status_code == 413
    ingress._held_bytes = 4  # of another request
    assert asyncio.run(ingress(request("POST", "/x", b"12345"))).status_code == 429
    assert asyncio.run(ingress(request("POST", "/x", b"1234"))).status_code == 200
    assert ingress._held_bytes == 4
    assert len(engine.asked) == 1


def test_a_reader_that_stops_stops_the_server() -> None:
    class Connection:
        is_paused = False

        def pause(self) -> None:
            self.is_paused = True

        def resume(self) -> None:
            self.is_paused = False

    async def test() -> None:
        connection = Connection()
        pieces = _Pieces(b"one", connection)  # type: ignore[arg-type]
        pieces.head(200, [])
        for _ in range(MAX_WAITING - 2):
            pieces.body(b"x")
        assert not connection.is_paused
        pieces.body(b"x")
        assert connection.is_paused
        await pieces.get()
        await pieces.get()
        assert not connection.is_paused

    asyncio.run(test())
