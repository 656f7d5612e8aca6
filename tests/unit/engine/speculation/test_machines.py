"""Draft lengths on pretend machines: text that cannot be guessed costs next to nothing, an edit is faster."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.registry import make_proposers
from tests.unit.engine.speculation.pretend_engine import Machine, PretendEngine

Text = Callable[[random.Random, int], tuple[list[int], list[int]]]


def reading(tokens: int, _: bool) -> float:
    """A GPU: reading weights takes all the time until there are many tokens."""
    return 5.0 + 0.004 * tokens + 0.02 * max(0, tokens - 256)


def counting(tokens: int, _: bool) -> float:
    """A small CPU: a token takes a third of what reading the weights does."""
    return 15.0 + 7.0 * tokens


def captured(tokens: int, has_drafts: bool) -> float:
    """A GPU whose steps with drafts are no captured graphs and take twice as long."""
    return (5.0 + 0.004 * tokens) * (2.0 if has_drafts else 1.0)


def new_text(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    return [rng.randrange(49_000) for _ in range(150)], [rng.randrange(49_000) for _ in range(length)]


def prose(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Words as often as in a language, in no order: pairs come again and mean nothing."""
    weights = [1 / (rank + 1) for rank in range(500)]
    return rng.choices(range(500), weights, k=200), rng.choices(range(500), weights, k=length)


def edit(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """The prompt again, with another token in place of one in twenty."""
    prompt = [rng.randrange(49_000) for _ in range(length)]
    return prompt, [rng.randrange(49_000) if rng.random() < 0.05 else token for token in prompt]


def speed_up(machine: Machine, text: Text, rows: int, depth: int, length: int = 300) -> float:
    """Seconds without speculation by seconds with it; measured times are noisy, the sum is not."""
    rng = random.Random(rows)
    proposers = make_proposers(SpeculationConfig(method="ngram", num_tokens=16), depth)
    engine = PretendEngine(proposers, machine, depth, seed=rows)
    for _ in range(rows):
        engine.submit(*text(rng, length))
    engine.run()
    return length * machine(rows, False) / engine.seconds


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("text", [new_text, prose])
@pytest.mark.parametrize("machine", [reading, counting])
@pytest.mark.parametrize("depth", [1, 2])
def test_text_that_cannot_be_guessed_is_at_most_three_percent_slower(
    depth: int, machine: Machine, text: Text, rows: int
) -> None:
    assert speed_up(machine, text, rows, depth) > 0.97


@pytest.mark.parametrize(
    ("machine", "rows", "least"),
    [(reading, 1, 4.0), (reading, 8, 3.0), (reading, 64, 1.7), (counting, 1, 1.4), (counting, 64, 0.97)],
)
def test_an_edit_is_faster_as_far_as_the_machine_allows(machine: Machine, rows: int, least: float) -> None:
    assert speed_up(machine, edit, rows, depth=1) > least


@pytest.mark.parametrize(("rows", "least"), [(1, 3.5), (8, 2.6), (64, 1.3)])
def test_an_edit_is_faster_although_drafts_wait_for_steps_in_flight(rows: int, least: float) -> None:
    assert speed_up(reading, edit, rows, depth=2, length=1_000) > least


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("text", [new_text, prose])
def test_where_a_draft_costs_a_graph_and_a_wait_it_is_soon_given_up(text: Text, rows: int) -> None:
    assert speed_up(captured, text, rows, depth=2, length=1_000) > 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 2.5), (8, 1.2), (64, 0.97)])
def test_an_edit_is_never_much_slower_even_there(rows: int, least: float) -> None:
    assert speed_up(captured, edit, rows, depth=2, length=1_000) > least
