"""Features compose. A crowd runs under a random combination of cache dtypes, quantization, ranks, stages, tiers, block
sizes, policies, speculation and adapters, with preemption, prefix hits, images, grammars, beams, several samples,
aborts, pauses, sleep and new weights. Every answer must be the one that its request gets alone. QUIRE_TEST_SEEDS sets
how many combinations each family is tried with."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from combinations import PICTURES, Case, Combination, CombinationRun, VisionCase, random_combination
from family_models import FamilyCase
from mtp_heads import STORED
from quire.types.errors import ConfigError
from tests.families.matrix import SAME_BLOCKS

MEETS = (
    "compared", "preempted", "ngram", "draft_model", "mtp", "cached", "beams", "adapted", "grammars", "samplers",
    "pause", "sleep", "update_weights",
)  # fmt: skip
MOST_SEEDS = 40
MOST_DRAWS, DRAWS_APART = 20, 10**7  # of one seed
SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "1"))


def play(case: Case, seed: int, folder: Path) -> Counter[str]:
    """Run one combination. Returns what its crowd met."""
    run, combination = draw(case, sum(case.name.encode()) * 1_000 + seed, folder)
    try:
        run.run()
    except BaseException as error:
        error.add_note(str(combination))
        raise
    assert run.met["compared"] > 0
    return run.met


def draw(case: Case, number: int, folder: Path) -> tuple[CombinationRun, Combination]:
    """Draw combinations by seeds that follow from `number`, until the model can run with one."""
    model, has_head = case.checkpoint().config, isinstance(case, FamilyCase) and case.name in STORED
    refused: list[str] = []
    while len(refused) < MOST_DRAWS:
        combination = random_combination(number + len(refused) * DRAWS_APART, model, has_head=has_head)
        try:
            return CombinationRun(case, combination, folder / str(len(refused))), combination
        except ConfigError as error:
            refused.append(str(error))
    raise AssertionError(f"every combination was refused: {refused}")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_of_a_crowd_are_those_of_each_request_alone(case: FamilyCase, seed: int, tmp_path: Path) -> None:
    if case.name in SAME_BLOCKS and "QUIRE_TEST_SEEDS" not in os.environ and "QUIRE_TEST_WHOLE" not in os.environ:
        pytest.skip(f"its blocks are those of {SAME_BLOCKS[case.name]}; make families runs it")
    play(case, seed, tmp_path)


@pytest.mark.parametrize("name", PICTURES)
def test_so_are_those_with_images(name: str, tmp_path: Path) -> None:
    case, met = VisionCase(name, tmp_path / "model"), Counter[str]()
    for seed in range(SEEDS):
        met += play(case, seed, tmp_path / str(seed))
    assert met["images"] > 0


def test_crowds_meet_what_they_are_made_for(tmp_path: Path) -> None:
    case, met = FamilyCase("qwen3_5_text", tmp_path / "model"), Counter[str]()
    for seed in range(MOST_SEEDS):
        met += play(case, seed, tmp_path / str(seed))
        if all(met[what] for what in MEETS):
            return
    raise AssertionError(f"never met: {[what for what in MEETS if not met[what]]}")
