"""The serving comparison, run for real over stub servers."""

from __future__ import annotations

import errno
import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import server as serving_server
from benchmarks.serving.__main__ import main, synthetic_jobs, table_of
from benchmarks.serving.compare import Visit, compare, medians, parse_rates
from benchmarks.serving.server import Contestant, ServerFailed, running
from quire.types.errors import QuireError

SUPPORT = str(Path(__file__).resolve().parents[2] / "support")
STUB = f"{sys.executable} -m stub_openai {{port}}"
VARIABLES = {"PYTHONPATH": SUPPORT}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_server, "SETTLE_SECONDS", 0.0)


def stub(name: str, command: str = STUB) -> Contestant:
    return Contestant(name, command, VARIABLES, "/v1/models")


def visit(name: str, rate: str, tokens: float, boot: float = 1.0) -> Visit:
    summary: dict[str, Any] = {"output_tokens_per_s": tokens, "requests_per_s": 1.0, "failed": 0}
    spread = {"mean": 5.0, "p50": 4.0, "p99": 9.0}
    summary |= {"ttft_ms": spread, "tpot_ms": spread, "e2e_ms": None}
    return Visit(name, rate, math.inf, boot, 100, 50, summary)


def test_both_servers_get_the_same_requests_in_turns() -> None:
    kept: list[int] = []
    jobs = synthetic_jobs(3)
    visits = compare(
        [stub("a"), stub("b")], jobs, ["inf", "half"], 2, time_limit=120, keep=lambda visits: kept.append(len(visits))
    )
    assert [one.contestant for one in visits] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [one.rate for one in visits[:4]] == ["inf", "inf", "half", "half"]
    assert all(one.summary["completed"] == 3 for one in visits)
    slowest = min(one.summary["requests_per_s"] for one in visits[:2])
    assert visits[2].requests_per_s == visits[3].requests_per_s == slowest / 2
    assert kept == list(range(1, 9))
    assert all(one.idle_rss_bytes > 2**20 and one.boot_seconds > 0 for one in visits)


def test_a_server_is_gone_with_all_its_processes_afterwards() -> None:
    """A shell that ends at once leaves its child behind."""
    with running(stub("a", f"sh -c '{STUB} & wait'"), 120) as server:
        port = int(server.url.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
    deadline = time.monotonic() + 60  # the kernel closes a killed process's sockets when it comes to it
    while _accepts(port) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _accepts(port)


def _accepts(port: int) -> bool:
    with socket.socket() as late:
        return late.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('none here')", "it ended with code 1: none here"),
        ("pass", "it ended with code 0"),
    ],
)
def test_a_server_that_does_not_start_is_told_with_its_last_line(program: str, said: str) -> None:
    broken = stub("broken", f'{sys.executable} -c "{program}" {{port}}')
    with pytest.raises(ServerFailed, match=f"broken: {said}"):
        compare([broken], synthetic_jobs(1), ["inf"], 1, time_limit=120, keep=lambda visits: None)


def test_a_server_that_is_never_ready_is_given_up() -> None:
    silent = stub("silent", f'{sys.executable} -c "import time; time.sleep(60)" {{port}}')
    with pytest.raises(ServerFailed, match="silent: it was not ready after 0 s"):
        compare([silent], synthetic_jobs(1), ["inf"], 1, time_limit=0.2, keep=lambda visits: None)


def test_medians_and_ratios_are_taken_per_rate() -> None:
    visits = [visit("quire", "inf", 10, 2), visit("quire", "inf", 30, 4), visit("peer", "inf", 10, 12)]
    figures = medians(visits)
    assert figures["quire"]["inf.output_tokens_per_s"] == 20
    assert figures["quire"]["boot_seconds"] == 3
    header, rows = table_of(figures, ["inf"])
    assert header == ["", "quire", "peer", "quire / peer"]
    assert ["boot to ready s", "3.0", "12.0", "0.25x"] in rows
    assert ["at inf: out tok/s", "20.0", "10.0", "2.00x"] in rows
    assert ["at inf: failed", "0", "0", "-"] in rows


@pytest.mark.parametrize("rates", ["half", "half,inf", "inf,0", "1,x", ""])
def test_rates_that_make_no_sense_are_refused(rates: str) -> None:
    with pytest.raises(QuireError, match="^--rates: "):
        parse_rates(rates)


def test_requests_made_from_the_seed_are_the_same_every_time() -> None:
    made = synthetic_jobs(200)
    assert made[:50] == synthetic_jobs(50)
    assert all(32 <= len(job.prompt) <= 512 and 16 <= job.max_tokens <= 256 for job in made)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peer", "server"], "--peer: the command has no {port}"),
        (["--peer", "server {port}", "--peer-env", "X"], "--peer-env: must be NAME=VALUE"),
        (["--requests", "0"], "--requests and --repeats must be at least 1"),
        (["--workload", "/nowhere/at/all.json"], "workload: /nowhere/at/all.json cannot be read"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    assert said in capsys.readouterr().err


def test_the_command_prints_a_table_and_keeps_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.serving.__main__._contestants", lambda arguments: [stub("quire"), stub("peer")])
    out = tmp_path / "results.json"
    assert main(["--requests", "2", "--rates", "inf", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "at inf: TTFT p99 ms" in printed
    assert "quire / peer" in printed
    kept = json.loads(out.read_text())
    assert [one["contestant"] for one in kept["visits"]] == ["quire", "peer"]
    assert kept["medians"]["peer"]["inf.output_tokens_per_s"] > 0
