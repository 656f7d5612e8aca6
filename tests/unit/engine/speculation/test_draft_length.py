from __future__ import annotations

import random

import numpy as np
import pytest

from quire.engine.speculation.draft_gate import DraftGate
from quire.engine.speculation.draft_length import Chances, DraftLengths, Experience


def lengths(extra: float, rows: int = 1, depth: int = 1) -> DraftLengths:
    """A machine where every token more costs `extra` of a step of `rows` tokens."""
    made = DraftLengths(depth)
    for _ in range(80):
        made.note_step(rows, rows, 0.01)
        for more in (1, 2, 4, 8, 16):
            made.costs.note(rows + more, 0.01 * (1 + extra * more))
    for _ in range(20):
        made.note_step(rows, rows, 0.01)
    return made


def length(lengths: DraftLengths, chances: Chances) -> int:
    return lengths.length(chances, 16).num_tokens


def test_a_draft_is_as_long_as_its_tokens_are_likely_enough_to_pay() -> None:
    cheap, dear = lengths(0.05), lengths(0.4)
    assert length(cheap, Chances(0.9, 0.9)) >= 14
    assert 2 <= length(cheap, Chances(0.5, 0.5)) <= 6
    assert length(cheap, Chances(0.02, 0.5)) == 0
    assert length(dear, Chances(0.35, 0.35)) == 0
    assert length(dear, Chances(0.9, 0.9)) in range(4, 12)
    assert length(dear, Chances(0.7, 0.98)) == 16  # it may not begin, but then it goes on


def test_where_steps_are_bound_by_arithmetic_nothing_is_drafted_but_a_few_probes() -> None:
    full = lengths(1 / 64, rows=64)  # a token costs the 64th part of a step of 64: as much as it can bring
    probes, likely = 0, Chances(0.95, 0.95)
    while (probe := full.length(likely, 16)).num_tokens:
        assert probe.is_probe
        full.note_probe(64)
        full.note_result(64, 60, is_probe=True)
        full.note_step(128, 128, 0.02)
        probes += 1
    assert probes <= 5
    free = lengths(0.0, rows=64)
    assert length(free, Chances(0.95, 0.95)) == 16


def test_the_probes_of_a_step_have_as_many_tokens_as_it_has_rows() -> None:
    full, likely, drafts = lengths(1 / 64, rows=64), Chances(0.95, 0.95), []
    while probe := full.length(likely, 24).num_tokens:
        full.note_probe(probe)
        drafts.append(probe)
    assert drafts == [24, 24, 16]
    full.note_step(64, 64, 0.01)
    assert full.length(likely, 24).is_probe  # in the next step there is room again


def test_asking_how_long_a_draft_should_be_uses_up_no_probe() -> None:
    """Neither do drafts that were made because they pay, in steps in which somebody asked."""
    asked, likely = lengths(1 / 64, rows=64), Chances(0.95, 0.95)
    for _ in range(20):
        assert asked.length(likely, 16).is_probe
        asked.note_result(1, 1, is_probe=False)
        asked.note_step(65, 65, 0.01)
    asked.note_result(64, 60, is_probe=True)
    assert asked.length(likely, 16).is_probe  # one of a few


def test_probes_end_although_their_rows_are_missing_from_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait for results make steps of 64 rows look like steps of fewer: they are of one batch all the same."""
    monkeypatch.setattr(DraftGate, "allows", True)
    full, likely, num_probes = lengths(1 / 64, rows=64, depth=2), Chances(0.95, 0.95), 0
    for _ in range(40):
        if full.length(likely, 16).is_probe:
            num_probes += 1
            full.note_result(16, 1, is_probe=True)
            full.note_step(40 + 16, 40 + 16, 0.02)
        for _ in range(3):
            full.note_step(64, 64, 0.01)
    assert num_probes <= 6


def test_waiting_for_results_counts_as_tokens_lost() -> None:
    cheap = lengths(0.02, depth=2)
    assert length(cheap, Chances(0.45, 0.45)) > 0
    for _ in range(20):
        since = cheap.num_steps
        for _ in range(2):
            cheap.note_step(1, 1, 0.01)
        cheap.note_rounds(since)
    assert cheap.rounds == pytest.approx(2.0, abs=0.01)
    assert length(cheap, Chances(0.45, 0.45)) == 0
    assert length(cheap, Chances(0.9, 0.9)) > 0


def test_what_waiting_costs_is_learned_for_batches_of_each_octave() -> None:
    made = lengths(0.02, rows=8, depth=2)
    for _ in range(20):
        made.note_rounds(made.num_steps - 2)
    assert made.rounds == pytest.approx(2.0, abs=0.01)
    for _ in range(20):
        made.note_step(1, 1, 0.01)
    assert made.rounds == 1.0  # a sequence that is alone misses no step


def test_with_one_step_in_flight_every_sequence_is_in_every_step() -> None:
    made = lengths(0.02, rows=8)
    made.note_rounds(made.num_steps - 3)
    assert made.rounds == 1.0


def test_a_pause_of_a_sequence_is_no_cost_of_waiting() -> None:
    made = lengths(0.02, rows=8, depth=2)
    for _ in range(40):
        made.note_rounds(made.num_steps - 90)
    assert made.rounds <= 4.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_probes", [False, True])
def test_a_batch_is_worth_drafts_exactly_where_each_of_its_sequences_is(seed: int, has_probes: bool) -> None:
    rng = random.Random(seed)
    rows, limit = rng.choice((8, 64)), rng.choice((1, 4, 16))
    made = lengths(rng.choice((0.0, 0.02, 0.2, 1.0)), rows, depth=2)
    for _ in range(8):  # as many as there are probes
        made.note_result(rows, 0, is_probe=not has_probes)
        made.note_step(2 * rows, 2 * rows, 0.01)
    for _ in range(20):
        made.note_rounds(made.num_steps - rng.randrange(1, 3))
    for _ in range(9):
        made.note_step(rows, rows, 0.01)
    assert made.allows_drafts
    chances = [Chances(rng.random(), rng.random()) for _ in range(300)]
    first, following = (np.array(column) for column in zip(*chances, strict=True))
    alone = [made.length(each, limit) for each in chances]
    room, expected = made.probe_room, []
    for num_tokens, is_probe in alone:
        expected.append(num_tokens > 0 and (room > 0 or not is_probe))
        room -= num_tokens if is_probe else 0
    assert made.are_worth(first, following, limit).tolist() == expected
    assert has_probes or not any(each.is_probe for each in alone)


def test_experience_begins_with_its_prior_and_forgets_what_is_long_ago() -> None:
    seen = Experience(0.9)
    assert not seen.has_any
    assert seen.mean(0.6, 2.0) == 0.6
    for _ in range(40):
        seen.add(is_right=False)
    assert seen.has_any
    assert seen.mean(0.6, 2.0) < 0.15
    for _ in range(40):
        seen.add(is_right=True)
    assert seen.mean(0.6, 2.0) > 0.9


def test_experience_of_a_batch_is_that_of_its_guesses_one_after_the_other() -> None:
    rng = random.Random(0)
    one_by_one, at_once = Experience(0.99), Experience(0.99)
    for count in (3, 1, 40, 7):
        guesses = [rng.random() < 0.7 for _ in range(count)]
        for is_right in guesses:
            one_by_one.add(is_right=is_right)
        at_once.add_all(np.array(guesses))
        assert at_once.mean(0.2, 4.0) == pytest.approx(one_by_one.mean(0.2, 4.0), rel=1e-12)
