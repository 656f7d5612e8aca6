"""Hostile requests by the thousand beside a stream of the default model, and Schemathesis against the whole API."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_run import Canary, send_heads, send_hostile
from real_server import RealServer, resident_bytes
from schemathesis_run import run_schemathesis
from tests.soak.conftest import Note, Start

pytestmark = pytest.mark.soak
BODIES = 2_000
SMALL = ("--max-model-len", "96", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--limit", "n=8",
         "--limit", "choices=16", "--limit", "max_tokens=24")  # fmt: skip
CANARY = {"prompt": "The three primary colours are", "max_tokens": 24, "temperature": 0}


def attack(server: RealServer, note: Note) -> int:
    """Send all the bodies and show that the server stood; how many of them were answered."""
    processes = sorted(server.processes())
    (edge,) = server.processes("quire.serving.edge_main")
    canary, before = Canary(server.url, CANARY), resident_bytes(edge)
    seen = canary.beside(lambda: send_hostile(server.url, BODIES, seed=23, workers=8))
    heads = send_heads(server.port)
    note(
        bodies=BODIES,
        statuses=dict(seen.statuses),
        heads=dict(heads.statuses),
        canaries=len(canary.heard),
        edge_mib=[round(size / 2**20) for size in (before, resident_bytes(edge))],
    )
    assert seen.faults == []
    assert heads.faults == []
    assert canary.error is None
    assert canary.heard
    assert [heard for heard in canary.heard if heard != canary.expected] == []
    assert sorted(server.processes()) == processes  # nothing was restarted
    server.wait(server.is_idle)
    assert not [line for line in server.lines if "Traceback" in line]
    return sum(seen.statuses.values())


@pytest.mark.model
def test_hostile_bodies_beside_a_stream_of_the_default_model(start_default: Start, note: Note) -> None:
    assert attack(start_default("--threads", "2", *SMALL), note) == BODIES


def test_hostile_bodies_beside_a_stream_of_the_tiny_model(start_tiny: Start, note: Note) -> None:
    assert attack(start_tiny(*SMALL), note) == BODIES


def test_schemathesis_finds_no_server_error_and_no_answer_that_breaks_its_schema(
    start_tiny: Start, note: Note, tmp_path: Path
) -> None:
    pytest.importorskip("schemathesis")
    server = start_tiny("--max-model-len", "256", "--max-num-seqs", "16", "--limit", "max_tokens=16", "--strict")
    processes = sorted(server.processes())
    report = run_schemathesis(server.url, tmp_path, 300, "--phases", "coverage,fuzzing")
    note(cases=report.num_cases, summary=report.summary)
    assert not report.failures, report.failures
    assert report.num_cases >= 2_000
    assert sorted(server.processes()) == processes
    server.wait(server.is_idle)
