"""The ids that requests have in the engine."""

from __future__ import annotations

from quire.serving.http.request_head import RequestHead


def test_requests_of_one_name_have_different_ids_in_the_engine() -> None:
    """Gateways and scripts send one X-Request-Id with all requests. Two requests of one id would lose an answer."""
    head = RequestHead("same", True, "", False, False, 0.0)
    ids = [head.engine_ids("cmpl", None, 1)[0] for _ in range(50_000)]
    assert len(set(ids)) == len(ids)
    assert all(one.startswith("cmpl-same~") for one in ids)
