from __future__ import annotations

import random

import pytest

from quire.engine.speculation.step_costs import StepCosts


def taught(seconds_by_tokens: dict[int, float], rounds: int = 60) -> StepCosts:
    costs = StepCosts()
    rng = random.Random(0)
    for _ in range(rounds):
        for tokens, seconds in seconds_by_tokens.items():
            costs.note(tokens, seconds * rng.uniform(0.95, 1.05))
    return costs


def test_relative_costs_are_those_that_were_measured() -> None:
    costs = taught({1: 0.02, 4: 0.04, 17: 0.12})
    assert costs.cost(4) / costs.cost(1) == pytest.approx(2.0, rel=0.1)
    assert costs.cost(17) / costs.cost(1) == pytest.approx(6.0, rel=0.1)
    assert costs.cost(2) / costs.cost(1) == pytest.approx(1.33, rel=0.1)  # on a straight line between them


def test_a_machine_that_becomes_slow_makes_no_number_of_tokens_look_dear() -> None:
    costs = taught({1: 0.02, 8: 0.05})
    for _ in range(200):
        costs.note(1, 0.1)
    assert costs.cost(8) / costs.cost(1) == pytest.approx(2.5, rel=0.3)


def test_one_pause_of_the_machine_teaches_next_to_nothing() -> None:
    costs = taught({1: 0.02, 8: 0.05})
    costs.note(8, 30.0)
    assert costs.cost(8) / costs.cost(1) == pytest.approx(2.5, rel=0.15)


def test_the_first_step_of_a_size_teaches_nothing_about_its_cost() -> None:
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
