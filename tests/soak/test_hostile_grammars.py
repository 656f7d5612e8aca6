"""Every hostile structure in every field that can carry one: the engine stays small and others are not held up."""

from __future__ import annotations

import pytest

from hostile_grammars import attack, bodies
from hostile_structures import all_hostile
from tests.soak.conftest import Note, Start

pytestmark = pytest.mark.soak
FLAGS = (
    "--max-model-len", "1024", "--max-num-seqs", "16", "--reasoning-parser", "qwen3",
    "--num-kv-blocks", "256", "--no-enable-prefix-caching",  # the cache is touched as it fills: keep it small
)  # fmt: skip
MAX_GROWTH = 64 << 20
MAX_SECONDS = 2.0


def test_there_are_enough_of_them() -> None:
    assert len(all_hostile()) >= 100
    assert sum(1 for hostile in all_hostile() for _ in bodies(hostile)) >= 1_000


@pytest.mark.model
def test_hostile_grammars_beside_harmless_ones_of_the_default_model(start_default: Start, note: Note) -> None:
    server = start_default("--threads", "2", *FLAGS)
    processes = sorted(server.processes())
    damage = attack(server, all_hostile())
    slowest = max(damage.seconds)
    note(
        statuses=dict(damage.statuses),
        growth_mib=round(damage.growth / 2**20, 1),
        harmless=len(damage.seconds),
        slowest_seconds=round(slowest, 2),
    )
    assert damage.faults == []
    assert damage.growth <= MAX_GROWTH
    assert slowest <= MAX_SECONDS
    assert sorted(server.processes()) == processes
