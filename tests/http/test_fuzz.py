"""Hostile requests, made from the table of parameters, beside a stream that must not notice."""

from __future__ import annotations

from hostile_bodies import PATHS
from hostile_run import Canary, send_heads, send_hostile
from tests.http.conftest import Serve

BODIES = 480


def test_hostile_bodies_never_fail_the_server_nor_touch_a_stream_beside_them(serve: Serve) -> None:
    server = serve(lambda prompt, index: "c" * 300, step_seconds=0.001)
    canary = Canary(server.url, {"prompt": "canary", "max_tokens": 400})
    seen = canary.beside(lambda: send_hostile(server.url, BODIES, seed=11))
    assert seen.faults == []
    assert set(seen.statuses) >= {200, 400}
    assert all(seen.paths[path] >= 10 for path in PATHS.values())
    assert canary.error is None
    assert canary.heard
    assert all(heard == canary.expected for heard in canary.heard)
    assert server.link.core is not None
    server.wait(server.is_idle)


def test_requests_that_are_no_http_never_fail_the_server(serve: Serve) -> None:
    server = serve()
    assert send_heads(server.port).faults == []
    assert server.get("/health").status_code == 200
    server.wait(server.is_idle)
