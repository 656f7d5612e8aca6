"""The benchmark of the server's start, over a stub server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.serving.server import Contestant, ServerFailed
from benchmarks.start import Start, measure, table_of

SUPPORT = str(Path(__file__).resolve().parents[2] / "support")


def server(command: str, ready_path: str) -> Contestant:
    return Contestant("stub", f"{sys.executable} -m {command} {{port}}", {"PYTHONPATH": SUPPORT}, ready_path)


def test_a_start_is_timed_to_its_first_token_and_weighed_by_process() -> None:
    start = measure(server("stub_openai", "/v1/models"))
    assert 0 < start.ready_s < start.first_token_s
    assert list(start.processes) == ["stub_openai"]
    assert start.processes["stub_openai"] == start.pss_bytes > 2**20
    assert start.peak_rss_bytes >= start.rss_bytes >= start.pss_bytes
    assert start.cpu_s > 0


def test_a_server_that_streams_no_token_has_no_figure() -> None:
    with pytest.raises(ServerFailed, match="streamed no token"):
        measure(server("http.server --bind 127.0.0.1", "/"))  # it knows no POST


def test_the_table_has_medians_and_the_processes_of_the_last_start() -> None:
    starts = [
        Start(
            float(second),
            second + 0.5,
            second * 1.5,
            second * 10**8,
            second * 10**9,
            second * 10**9,
            {"engine_main": second * 10**6},
        )
        for second in (1, 9, 2)
    ]
    assert table_of(starts) == [
        ["process start to ready s", "2.00"],
        ["process start to first token s", "2.50"],
        ["CPU seconds to first token", "3.00"],
        ["PSS of all processes MB", "200"],
        ["RSS of all processes MB", "2000"],
        ["peak RSS of all processes MB", "2000"],
        ["PSS of engine_main MB", "2"],
    ]
