"""The control on pretend machines: what a step costs is a formula, and time is its sum."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import Lookahead
from quire.engine.decoding.lookahead_ngram import NgramLookaheads
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

Machine = Callable[[int], float]
Text = Callable[[random.Random], tuple[list[int], list[int]]]
LENGTH = 300


def reading(tokens: int) -> float:
    """A GPU: reading weights takes all the time until there are many tokens."""
    return 5.0 + 0.004 * tokens + 0.02 * max(0, tokens - 256)


def counting(tokens: int) -> float:
    """A small CPU: a token takes a third of what reading the weights does."""
    return 15.0 + 7.0 * tokens


def new_text(rng: random.Random) -> tuple[list[int], list[int]]:
    return [rng.randrange(49_000) for _ in range(150)], [rng.randrange(49_000) for _ in range(LENGTH)]


def prose(rng: random.Random) -> tuple[list[int], list[int]]:
    """Words as often as in a language, in no order: pairs come again and mean nothing."""
    weights = [1 / (rank + 1) for rank in range(500)]
    return rng.choices(range(500), weights, k=200), rng.choices(range(500), weights, k=LENGTH)


def edit(rng: random.Random) -> tuple[list[int], list[int]]:
    """The prompt again, with another token in place of one in twenty."""
    prompt = [rng.randrange(49_000) for _ in range(LENGTH)]
    return prompt, [rng.randrange(49_000) if rng.random() < 0.05 else token for token in prompt]


def speed_up(machine: Machine, text: Text, rows: int) -> float:
    """Seconds without speculation by seconds with it; measured times are noisy, the sum is not."""
    rng = random.Random(rows)
    lookaheads = NgramLookaheads(SpeculationConfig(method="ngram", num_tokens=16), runs_ahead=False)
    live = []
    for row in range(rows):
        prompt, answer = text(rng)
        request = Submit(str(row), tuple(prompt), SamplingParams(max_tokens=LENGTH))
        live.append((lookaheads.begin(request), answer))
    seconds = 0.0
    while live:
        drafts = [lookahead.propose(len(answer) - 1) for lookahead, answer in live]
        tokens = sum(1 + len(draft) for draft in drafts)
        seconds += machine(tokens)
        for (lookahead, answer), draft in zip(live, drafts, strict=True):
            right = 0
            while right < len(draft) and draft[right] == answer[right]:
                right += 1
            if draft:
                lookahead.result(len(draft), right)
            lookahead.observe(answer[: right + 1])
            del answer[: right + 1]
        noise = math.exp(rng.gauss(0.0, 0.05)) * (5.0 if rng.random() < 0.003 else 1.0)
        lookaheads.note_step(tokens, tokens, machine(tokens) * noise)
        live = [each for each in live if each[1]]
    return LENGTH * machine(rows) / seconds


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("text", [new_text, prose])
@pytest.mark.parametrize("machine", [reading, counting])
def test_text_that_cannot_be_guessed_is_at_most_three_percent_slower(machine: Machine, text: Text, rows: int) -> None:
    assert speed_up(machine, text, rows) > 0.97


@pytest.mark.parametrize(
    ("machine", "rows", "least"),
    [(reading, 1, 4.0), (reading, 8, 3.0), (reading, 64, 1.7), (counting, 1, 1.4), (counting, 64, 0.97)],
)
def test_an_edit_is_faster_as_far_as_the_machine_allows(machine: Machine, rows: int, least: float) -> None:
    assert speed_up(machine, edit, rows) > least


class Ahead:
    """A sequence on a machine with two steps in flight: one that waits for its result sits out the step after it."""

    def __init__(self, lookahead: Lookahead, answer: list[int]) -> None:
        self.lookahead, self.answer = lookahead, answer
        self.ran: list[int] = []  # tokens since it was last asked
        self.sits_out = False

    def step(self) -> tuple[int, int]:
        """Take part in a step; how many tokens it computes, and how many of them are a draft."""
        if self.sits_out:
            self.sits_out = False
            self.lookahead.observe(self.ran)
            self.ran = []
            return 0, 0
        if self.lookahead.num_ahead:
            self.ran.append(self.answer.pop(0))
            self.sits_out = len(self.ran) >= self.lookahead.num_ahead
            return 1, 0
        draft = self.lookahead.propose(len(self.answer) - 1)
        right = 0
        while right < len(draft) and draft[right] == self.answer[right]:
            right += 1
        if draft:
            self.lookahead.result(len(draft), right)
        self.ran, self.sits_out = self.answer[: right + 1], True
        del self.answer[: right + 1]
        return 1 + len(draft), len(draft)


def speed_up_ahead(text: Text, rows: int, length: int = 1_000) -> float:
    """As `speed_up`, where a step with a draft is no captured graph and takes twice as long."""
    rng = random.Random(rows)
    lookaheads = NgramLookaheads(SpeculationConfig(method="ngram", num_tokens=16), runs_ahead=True)
    live = []
    for row in range(rows):
        prompt, answer = text(rng)
        answer = (answer * -(-length // len(answer)))[:length] if text is edit else answer[:length]
        while len(answer) < length:
            answer += text(rng)[1][: length - len(answer)]
        live.append(Ahead(lookaheads.begin(Submit(str(row), tuple(prompt), SamplingParams(max_tokens=length))), answer))
    seconds = 0.0
    while live:
        parts = [each.step() for each in live]
        tokens, drafted = sum(part[0] for part in parts), sum(part[1] for part in parts)
        if tokens:
            taken = (5.0 + 0.004 * tokens) * (2.0 if drafted else 1.0)
            seconds += taken
            lookaheads.note_step(tokens, tokens, taken * math.exp(rng.gauss(0.0, 0.05)))
        live = [each for each in live if each.answer]
    return length * (5.0 + 0.004 * rows) / seconds


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("text", [new_text, prose])
def test_where_a_draft_costs_a_graph_and_a_turn_it_is_soon_given_up(text: Text, rows: int) -> None:
    assert speed_up_ahead(text, rows) > 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.5), (8, 0.97), (64, 0.97)])
def test_an_edit_is_never_much_slower_even_there(rows: int, least: float) -> None:
    assert speed_up_ahead(edit, rows) > least
