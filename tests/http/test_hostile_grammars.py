"""Hostile structures in every field that can carry one, sent to a real server: the engine's memory stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_grammars import attack
from hostile_structures import all_hostile
from real_server import RealServer
from tiny_served import FLAGS, write_tiny_model

pytest.importorskip("llguidance")
CHOSEN = (
    "json: 16 ** 8 alternatives", "json: 23 patterns at once", "json: definitions that double 40 times",
    "json: an enum of 9,000", "regex: a thousand of a thousand", "regex: an intersection of classes",
    "grammar: an ambiguous sum", "grammar: 8,000 rules", "choice: a choice of 250,000 letters",
)  # fmt: skip
MAX_GROWTH = 64 << 20


def test_no_hostile_structure_grows_the_engine_wherever_it_stands(tmp_path: Path) -> None:
    chosen = [hostile for hostile in all_hostile() if hostile.name in CHOSEN]
    assert len(chosen) == len(CHOSEN)
    flags = (*FLAGS, "--max-model-len", "1024", "--reasoning-parser", "qwen3")
    server = RealServer(write_tiny_model(tmp_path / "tiny"), flags)
    try:
        processes = sorted(server.processes())
        damage = attack(server, chosen)
        assert damage.faults == []
        assert damage.growth <= MAX_GROWTH
        assert sorted(server.processes()) == processes
    finally:
        server.close()
