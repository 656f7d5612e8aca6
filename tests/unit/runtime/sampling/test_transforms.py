from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.runtime.sampling.transforms import history_tokens
from quire.runtime.sampling.transforms.allowed_ids import AllowedIds
from quire.runtime.sampling.transforms.bad_words import BadWords
from quire.runtime.sampling.transforms.logit_bias import LogitBias
from quire.runtime.sampling.transforms.min_p import MinP
from quire.runtime.sampling.transforms.min_tokens import MinTokens
from quire.runtime.sampling.transforms.occurrence import OccurrencePenalty
from quire.runtime.sampling.transforms.repetition import RepetitionPenalty
from quire.runtime.sampling.transforms.temperature import Temperature
from quire.runtime.sampling.transforms.transform import Step, Transform
from quire.types.sampling import TokenRules
from quire.types.step import NewRow
from tests.unit.runtime.sampling.bench import CPU, Bench, LargestTensor, new_row, transform_rows
from tests.unit.runtime.sampling.naive import transformed

VOCAB = 70  # not a multiple of a tile
ROWS = 6

token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, min_size=1, max_size=8)
few = st.integers(0, 5)  # a small vocabulary makes words and repetitions likely

MAKERS: dict[str, Callable[[], Transform]] = {
    "allowed_ids": lambda: AllowedIds(ROWS, VOCAB, CPU),
    "bad_words": lambda: BadWords(ROWS, CPU),
    "min_tokens": lambda: MinTokens(ROWS, VOCAB, CPU),
    "logit_bias": lambda: LogitBias(ROWS, CPU),
    "repetition": lambda: RepetitionPenalty(ROWS, CPU),
    "occurrence": lambda: OccurrencePenalty(ROWS, CPU),
    "temperature": lambda: Temperature(ROWS, CPU),
    "min_p": lambda: MinP(ROWS, CPU),
}


def rows_of(**features: st.SearchStrategy[object]) -> st.SearchStrategy[list[NewRow]]:
    """Some rows of one batch, in any order, that may or may not use a feature."""

    def build(places: list[int], lines: list[dict[str, object]]) -> list[NewRow]:
        return [new_row(place, **line) for place, line in zip(places, lines, strict=False)]  # type: ignore[arg-type]

    history = {"prompt": st.lists(few, min_size=1, max_size=5), "output": st.lists(few, max_size=8)}
    line = st.fixed_dictionaries(history, optional=features)
    return st.builds(build, st.permutations(range(ROWS)), st.lists(line, min_size=1, max_size=ROWS))


words = st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)
CASES = {
    "allowed_ids": rows_of(allowed_token_ids=tokens),
    "bad_words": rows_of(rules=st.builds(lambda words: TokenRules(bad_words=words), words)),
    "min_tokens": rows_of(
        min_tokens=st.integers(0, 10), rules=st.builds(lambda ids: TokenRules(end_ids=tuple(ids)), tokens)
    ),
    "logit_bias": rows_of(logit_bias=st.dictionaries(token, st.floats(-100, 100, width=32), max_size=8)),
    "repetition": rows_of(repetition_penalty=st.floats(0.5, 2.0, width=32)),
    "occurrence": rows_of(presence_penalty=st.floats(-2, 2, width=32), frequency_penalty=st.floats(-2, 2, width=32)),
    "temperature": rows_of(temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])),
    "min_p": rows_of(min_p=st.floats(1 / 128, 1.0, width=32)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_transform_does_to_every_row_what_the_plain_definition_does(name: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(news=CASES[name], seed=st.integers(0, 2**31))
    def check(news: list[NewRow], seed: int) -> None:
        logits = torch.randn(len(news), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
        changed = transform_rows(MAKERS[name](), logits, news)
        for line, new in enumerate(news):
            expected = torch.tensor(transformed(logits[line].tolist(), new), dtype=torch.float32)
            torch.testing.assert_close(changed[line], expected, rtol=1e-5, atol=1e-4)

    check()


@pytest.mark.parametrize("name", MAKERS)
def test_rows_that_do_not_use_a_transform_are_no_members_of_it(name: str) -> None:
    transform = MAKERS[name]()
    transform.add(new_row(0, output=[3, 3]))
    assert len(transform.members) == 0
    assert transform.members.part(torch.tensor([0]).int().numpy(), CPU) is None


@pytest.mark.parametrize("name", MAKERS)
def test_a_slot_left_by_a_row_with_more_holds_nothing_of_it_for_the_next(name: str) -> None:
    used = {
        "allowed_token_ids": [1, 2, 3],
        "logit_bias": {4: 5.0, 6: 1.0},
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 1.0,
        "temperature": 0.5,
        "min_p": 0.5,
        "min_tokens": 9,
    }
    large = TokenRules(end_ids=(7, 8, 9), bad_words=((3,), (3, 4, 5), (9, 1)))
    small = TokenRules(end_ids=(5,), bad_words=((2, 2),))
    light = {**used, "allowed_token_ids": [5], "logit_bias": {1: 1.0}}
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    transform = MAKERS[name]()
    transform.add(new_row(1, rules=large, **used))
    transform.members.leave(1)
    new = new_row(0, output=[2, 2, 4], rules=small, **light)
    assert torch.equal(transform_rows(transform, logits, [new]), transform_rows(MAKERS[name](), logits, [new]))


def test_a_bad_word_may_not_begin_in_the_prompt() -> None:
    rules = TokenRules(bad_words=((1, 2),))
    logits = torch.zeros(2, VOCAB)
    changed = transform_rows(
        BadWords(ROWS, CPU), logits, [new_row(0, prompt=[1], rules=rules), new_row(1, output=[1], rules=rules)]
    )
    assert changed[0, 2] == 0.0
    assert changed[1, 2] == -math.inf


def test_the_bad_words_of_one_row_cost_no_other_row_anything() -> None:
    many = tuple((token % VOCAB,) for token in range(200))
    longest = (tuple(token % VOCAB for token in range(3_000)),)
    transform, logits = BadWords(ROWS, CPU), torch.zeros(1, VOCAB)
    transform.add(new_row(1, rules=TokenRules(bad_words=many + longest)))
    transform.members.leave(1)
    new = new_row(0, output=[2], rules=TokenRules(bad_words=((2, 3),)))
    with LargestTensor() as largest:
        changed = transform_rows(transform, logits, [new])
    assert changed.isinf().nonzero().tolist() == [[0, 3]]
    assert largest.num_numbers <= 16 * VOCAB  # the test's own rows; 200 words of 3,000 tokens would be 600,000


PENALTIES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.5},
    "occurrence": {"presence_penalty": 0.5, "frequency_penalty": 0.25},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_long_history_costs_the_penalties_of_other_rows_nothing(name: str) -> None:
    bench, transform, vocab_size = Bench(8, ROWS), MAKERS[name](), 8
    for row in range(ROWS):
        new = new_row(row, output=[row % 8] * (60 if row == 0 else 1), **PENALTIES[name])
        bench.add(new)
        transform.add(new)
    part = transform.members.part(np.arange(ROWS, dtype=np.int32), CPU)
    assert part is not None
    step = Step(bench.samples(range(ROWS)), bench.history, bench.history.num_prompt.numpy().astype(np.int64))
    with LargestTensor() as largest:
        transform.apply(torch.ones(ROWS, vocab_size), part, step)
    assert largest.num_numbers <= 60 + 2 * ROWS  # not ROWS * 60


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("at_once", [1, 7, 16])
def test_penalties_are_the_same_however_histories_are_cut(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[list[int]] = [[3, 4, 3], [], [5] * 20, [1], [6, 7, 6, 6, 7], []]
    news = [new_row(row, output=each, **PENALTIES[name]) for row, each in enumerate(outputs)]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
    whole = transform_rows(MAKERS[name](), logits, news)
    monkeypatch.setattr(history_tokens, "AT_ONCE", at_once)
    assert torch.equal(transform_rows(MAKERS[name](), logits, news), whole)


def test_the_prompt_counts_for_repetition_but_not_for_presence_and_frequency() -> None:
    logits = torch.ones(1, VOCAB)
    new = new_row(0, prompt=[1, 2], output=[2], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    assert transform_rows(RepetitionPenalty(ROWS, CPU), logits, [new])[0, :4].tolist() == [1.0, 0.5, 0.5, 1.0]
    assert transform_rows(OccurrencePenalty(ROWS, CPU), logits, [new])[0, :4].tolist() == [1.0, 1.0, -0.5, 1.0]


def test_an_end_of_text_outside_the_vocabulary_needs_no_ban() -> None:
    rules = TokenRules(end_ids=(VOCAB + 5, 3))
    changed = transform_rows(MinTokens(ROWS, VOCAB, CPU), torch.zeros(1, VOCAB), [new_row(min_tokens=2, rules=rules)])
    assert changed.isinf().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-8])
def test_a_tiny_temperature_leaves_only_the_best_token(temperature: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 30
    cold = transform_rows(Temperature(ROWS, CPU), logits, [new_row(temperature=temperature)])
    assert cold.isfinite().all()
    assert (cold - cold.amax()).exp().tolist() == (logits == logits.amax()).float().tolist()
