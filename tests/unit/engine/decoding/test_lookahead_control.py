from __future__ import annotations

import random

import pytest

from quire.engine.decoding.lookahead_control import FIRST_REST, TRIAL, Control, Experience, Pace
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


def test_steps_after_which_the_runtime_drafts_are_counted_apart() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.note(1, 0.01)
        costs.note(4, 0.05, drafting=True)
    assert costs.extra(1, 3, drafting=True)[2] == pytest.approx(4.0, rel=0.15)
    assert costs.extra(1, 3)[2] < 1.0


def control(extra: float, rows: int = 1, prior: float = 0.5) -> Control:
    """A machine where every token more costs `extra` of a step of `rows` tokens."""
    made = Control({0: prior})
    for _ in range(80):
        made.note_step(rows, rows, 0.01)
        for more in (1, 2, 4, 8, 16):
            made.costs.note(rows + more, 0.01 * (1 + extra * more))
    for _ in range(20):
        made.note_step(rows, rows, 0.01)
    return made


def test_a_draft_is_as_long_as_its_tokens_are_likely_enough_to_pay() -> None:
    cheap, dear = control(0.05), control(0.4)
    assert cheap.length(0.9, 16, 1.0, drafting=False) == 16
    assert 2 <= cheap.length(0.5, 16, 1.0, drafting=False) <= 6
    assert cheap.length(0.02, 16, 1.0, drafting=False) == 0
    assert dear.length(0.35, 16, 1.0, drafting=False) == 0
    assert dear.length(0.9, 16, 1.0, drafting=False) in range(4, 12)


def test_where_steps_are_bound_by_arithmetic_nothing_is_drafted() -> None:
    full = control(1 / 64, rows=64)  # a token costs the 64th part of a step of 64: as much as it can bring
    tries = 0
    while length := full.length(0.95, 16, 1.0, drafting=False):  # it is tried a few times, by a token of each row
        assert length == 1
        full.note_result(0, 64, 60)
        full.note_step(128, 128, 0.02)
        tries += 1
    assert tries <= 3
    free = control(0.0, rows=64)
    assert free.length(0.95, 16, 1.0, drafting=False) == 16


def test_waiting_for_results_counts_as_tokens_lost() -> None:
    cheap = control(0.02)
    assert cheap.length(0.45, 16, 1.0, drafting=False) > 0
    assert cheap.length(0.45, 16, 2.0, drafting=False) == 0
    assert cheap.length(0.9, 16, 2.0, drafting=False) > 0


def test_what_all_sequences_saw_is_what_a_new_one_expects() -> None:
    made = control(0.1, prior=0.7)
    for _ in range(50):
        made.note_result(0, 4, 0)
    assert made.chance(0, Experience()) < 0.1


def test_a_sequence_rests_after_drafts_that_fail_ever_longer_and_then_tries_again() -> None:
    made = control(0.2, prior=0.6)
    pace, rests = Pace(made, runs_ahead=False), []
    for _ in range(3):
        while (length := pace.length(0, 8)) == 0:
            pace.observe(1, waited=True)
        while pace.rest == 0:
            pace.result(0, length, 0)
        rests.append(pace.rest)
        assert pace.length(0, 8) == 0
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    pace.observe(rests[-1], waited=True)
    assert pace.length(0, 8, is_good=False) == 0
    assert pace.length(0, 8) == TRIAL


def test_a_sequence_whose_drafts_are_right_never_rests() -> None:
    pace = Pace(control(0.2, prior=0.3), runs_ahead=False)
    for _ in range(20):
        pace.result(0, 4, 4)
        pace.observe(5, waited=True)
        assert pace.rest == 0
    assert pace.length(0, 16) >= 8


def test_steps_that_a_sequence_waits_through_are_counted_and_those_it_runs_ahead_are_not() -> None:
    made = control(0.01, prior=0.45)
    pace, plain = Pace(made, runs_ahead=True), Pace(made, runs_ahead=False)
    for each in (pace, plain):
        each.observe(40, waited=False)
    made.num_steps += 40
    assert pace.length(0, 2) == plain.length(0, 2) == 2
    for _ in range(20):
        for each in (pace, plain):
            each.observe(1, waited=True)
        made.num_steps += 2
    assert plain.length(0, 2) == 2
    assert pace.length(0, 2) == 0  # so few right ones do not make up for every second step
