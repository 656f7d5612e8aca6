"""Features compose. A crowd runs under a random combination of cache dtypes, quantization, ranks, stages, tiers, block
sizes, speculation and adapters, with preemption, prefix hits, beams, several samples and aborts. Every answer must be
the one that its request gets alone. QUIRE_TEST_SEEDS sets how many combinations each family is tried with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from combinations import CombinationRun, random_combination
from family_models import FamilyCase
from quire.types.errors import ConfigError

SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "2"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_of_a_crowd_are_those_of_each_request_alone(case: FamilyCase, seed: int, tmp_path: Path) -> None:
    combination = random_combination(sum(case.name.encode()) * 1_000 + seed, case.checkpoint().config)
    try:
        run = CombinationRun(case, combination, tmp_path)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        run.run()
    except BaseException as error:
        error.add_note(str(combination))
        raise
    assert run.met["compared"] > 0
