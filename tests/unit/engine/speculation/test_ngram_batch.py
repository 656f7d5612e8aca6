"""Batches observed with arrays, against plain Python that observes one sequence after the other."""

from __future__ import annotations

import random

import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation import ngram, ngram_index
from quire.engine.speculation.ngram import NgramProposers
from tests.unit.engine.speculation.plain_reference import ComparedProposers
from tests.unit.engine.speculation.pretend_engine import Machine, PretendEngine

LOOKUPS = ((1, 1), (1, 3), (2, 4), (3, 8))


def cheap(tokens: int, _: bool) -> float:
    return 5.0 + 0.004 * tokens


def dear(tokens: int, _: bool) -> float:
    """Drafts never pay for long, so the gate opens and closes."""
    return 15.0 + 7.0 * tokens


def repetitive(rng: random.Random, vocabulary: int, length: int) -> tuple[list[int], list[int]]:
    """New tokens, and parts of the prompt and of itself."""
    prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(0, 90))]
    answer: list[int] = []
    while len(answer) < length:
        known = prompt + answer
        if known and rng.random() < 0.5:
            start = rng.randrange(len(known))
            answer += known[start : start + rng.randrange(1, 60)]
        else:
            answer += [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 20))]
    return prompt, answer[:length]


def compare(seed: int, rows: int, depth: int, machine: Machine, length: int) -> ComparedProposers:
    rng = random.Random(seed)
    shortest, longest = rng.choice(LOOKUPS)
    config = SpeculationConfig(
        method="ngram", num_tokens=rng.choice((1, 4, 16)), lookup_min=shortest, lookup_max=longest
    )
    proposers = ComparedProposers(NgramProposers(config, depth), config, depth)
    engine = PretendEngine(proposers, machine, depth, seed)
    vocabulary = rng.choice((3, 20, 300, 40_000))
    for _ in range(rows):
        engine.submit(*repetitive(rng, vocabulary, rng.randrange(length // 2, length)))
    engine.run()
    return proposers


@pytest.mark.parametrize("machine", [cheap, dear])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_batch_proposes_what_each_of_its_sequences_would_alone(
    rows: int, depth: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_index, "CATCH_UP_TOKENS", 10**9)  # the plain ones index everything at once
    returned = proposed = 0
    for seed in range(3):
        proposers = compare(seed, rows, depth, machine, 300)
        returned += proposers.num_returned
        proposed += proposers.num_proposed
    assert returned > 0
    assert proposed > 0


@pytest.mark.parametrize("few", [0, 10**9])
def test_arrays_and_single_reads_come_to_the_same_beyond_the_first_table(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_index, "CATCH_UP_TOKENS", 10**9)
    monkeypatch.setattr(ngram, "_FEW_ROWS", few)
    assert compare(11, 12, 2, cheap, 2_500).num_proposed > 0
