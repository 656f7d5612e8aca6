from __future__ import annotations

import random

import pytest

from quire.engine.decoding.lookahead_control import Chances, Control, Experience, Length, Rounds
from quire.engine.decoding.lookahead_costs import StepCosts


def taught(seconds_by_tokens: dict[int, float], rounds: int = 60) -> StepCosts:
    costs = StepCosts()
    rng = random.Random(0)
    for _ in range(rounds):
        for tokens, seconds in seconds_by_tokens.items():
            costs.note(tokens, seconds * rng.uniform(0.95, 1.05))
    return costs


def test_costs_beside_each_other_are_those_that_were_measured() -> None:
    costs = taught({1: 0.02, 4: 0.04, 17: 0.12})
    assert costs.cost(4) / costs.cost(1) == pytest.approx(2.0, rel=0.1)
    assert costs.cost(17) / costs.cost(1) == pytest.approx(6.0, rel=0.1)
    assert costs.cost(2) / costs.cost(1) == pytest.approx(1.33, rel=0.1)  # in a straight line between


def test_a_machine_that_becomes_slow_makes_no_number_of_tokens_look_dear() -> None:
    costs = taught({1: 0.02, 8: 0.05})
    for _ in range(200):
        costs.note(1, 0.1)
    assert costs.cost(8) / costs.cost(1) == pytest.approx(2.5, rel=0.3)


def test_one_pause_of_the_machine_teaches_next_to_nothing() -> None:
    costs = taught({1: 0.02, 8: 0.05})
    costs.note(8, 30.0)
    assert costs.cost(8) / costs.cost(1) == pytest.approx(2.5, rel=0.15)


def test_the_first_step_of_a_size_says_nothing_of_what_it_costs() -> None:
    costs = taught({1: 0.02})
    expected = costs.cost(8)
    costs.note(8, 5.0)
    assert costs.cost(8) == pytest.approx(expected, rel=0.05)
    costs.note(8, 0.05)
    assert costs.cost(8) / costs.cost(1) == pytest.approx(2.5, rel=0.1)


def test_steps_after_which_the_runtime_drafts_are_counted_apart() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.note(1, 0.01)
        costs.note(4, 0.05, drafting=True)
    assert costs.extra(1, 3, drafting=True)[2] == pytest.approx(4.0, rel=0.15)
    assert costs.extra(1, 3)[2] < 1.0


def control(extra: float, rows: int = 1) -> Control:
    """A machine where every token more costs `extra` of a step of `rows` tokens."""
    made = Control()
    for _ in range(80):
        made.note_step(rows, rows, 0.01)
        for more in (1, 2, 4, 8, 16):
            made.costs.note(rows + more, 0.01 * (1 + extra * more))
    for _ in range(20):
        made.note_step(rows, rows, 0.01)
    return made


def length(control: Control, chances: Chances, rounds: float) -> int:
    return control.length(chances, 16, rounds).num_tokens


def test_a_draft_is_as_long_as_its_tokens_are_likely_enough_to_pay() -> None:
    cheap, dear = control(0.05), control(0.4)
    assert length(cheap, Chances(0.9, 0.9), 1.0) >= 14
    assert 2 <= length(cheap, Chances(0.5, 0.5), 1.0) <= 6
    assert length(cheap, Chances(0.02, 0.5), 1.0) == 0
    assert length(dear, Chances(0.35, 0.35), 1.0) == 0
    assert length(dear, Chances(0.9, 0.9), 1.0) in range(4, 12)
    assert length(dear, Chances(0.7, 0.98), 1.0) == 16  # it may not begin, but then it goes on


def test_where_steps_are_bound_by_arithmetic_nothing_is_drafted() -> None:
    full = control(1 / 64, rows=64)  # a token costs the 64th part of a step of 64: as much as it can bring
    tries, likely = 0, Chances(0.95, 0.95)
    while (tried := full.length(likely, 16, 1.0)).num_tokens:  # it is tried a few times, by a token of each row
        assert tried == Length(1, is_try=True)
        full.note_result(64, 60, is_try=True)
        full.note_step(128, 128, 0.02)
        tries += 1
    assert tries <= 5
    free = control(0.0, rows=64)
    assert length(free, Chances(0.95, 0.95), 1.0) == 16


def test_asking_how_long_a_draft_should_be_uses_up_no_try() -> None:
    """Neither do drafts that were made because they pay, in steps in which somebody asked."""
    asked, likely = control(1 / 64, rows=64), Chances(0.95, 0.95)
    for _ in range(20):
        assert asked.length(likely, 16, 1.0).is_try
        asked.note_result(1, 1, is_try=False)
        asked.note_step(65, 65, 0.01)
    asked.note_result(64, 60, is_try=True)
    assert asked.length(likely, 16, 1.0).is_try  # one of a few


def test_waiting_for_results_counts_as_tokens_lost() -> None:
    cheap = control(0.02)
    assert length(cheap, Chances(0.45, 0.45), 1.0) > 0
    assert length(cheap, Chances(0.45, 0.45), 2.0) == 0
    assert length(cheap, Chances(0.9, 0.9), 2.0) > 0


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


def test_steps_that_a_sequence_waits_through_are_counted_and_those_it_runs_ahead_are_not() -> None:
    made = control(0.01)
    rounds, plain = Rounds(made, runs_ahead=True), Rounds(made, runs_ahead=False)
    rounds.observe(waited=False)
    made.num_steps += 40
    for _ in range(20):
        for each in (rounds, plain):
            each.observe(waited=True)
        made.num_steps += 2
    assert rounds.mean == pytest.approx(2.0, abs=0.01)
    assert plain.mean == 1.0  # with one step in flight, every sequence is in every step
