from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import messages


def call_once(function: Callable[[], object]) -> float:
    function()
    return 1.0


def test_every_way_of_a_request_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "least_us", call_once)
    assert len(list(messages.parameters())) == 3
    assert len(list(messages.requests(200))) == 4
    assert messages.routing(num_rows=8, num_steps=20) > 0
