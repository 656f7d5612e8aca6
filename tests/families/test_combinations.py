"""Features compose. A crowd runs under a random combination of cache dtypes, quantization, ranks, stages, tiers, block
sizes, speculation and adapters, with preemption, prefix hits, beams, several samples and aborts. Every answer must be
the one that its request gets alone. QUIRE_TEST_SEEDS sets how many combinations each family is tried with."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from combinations import CombinationRun, random_combination
from family_models import FamilyCase
from quire.types.errors import ConfigError
from tests.families.matrix import SAME_BLOCKS

SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "1"))


def play(case: FamilyCase, seed: int, folder: Path) -> Counter[str]:
    """Run one combination. Returns what its crowd met; nothing if the model cannot run with these settings."""
    combination = random_combination(sum(case.name.encode()) * 1_000 + seed, case.checkpoint().config)
    try:
        run = CombinationRun(case, combination, folder)
    except ConfigError:
        return Counter()
    try:
        run.run()
    except BaseException as error:
        error.add_note(str(combination))
        raise
    assert run.met["compared"] > 0
    return run.met


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_of_a_crowd_are_those_of_each_request_alone(case: FamilyCase, seed: int, tmp_path: Path) -> None:
    if case.name in SAME_BLOCKS and "QUIRE_TEST_SEEDS" not in os.environ and "QUIRE_TEST_WHOLE" not in os.environ:
        pytest.skip(f"its blocks are those of {SAME_BLOCKS[case.name]}; make families runs it")
    play(case, seed, tmp_path)


def test_crowds_meet_what_they_are_made_for(tmp_path: Path) -> None:
    case, met = FamilyCase("llama", tmp_path / "llama"), Counter[str]()
    for seed in range(100, 110):
        met += play(case, seed, tmp_path / str(seed))
    assert all(met[what] for what in ("compared", "preempted", "drafted", "cached", "beams", "adapted")), met
