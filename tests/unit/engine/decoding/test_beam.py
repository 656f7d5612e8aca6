"""Which hypotheses of a beam search go on and which are finished, without an engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import numpy as np
import pytest

from quire.engine.decoding.beam import BeamSearch, Child, EndOf, ranked
from quire.engine.decoding.controller import Ending
from quire.types.decoding import BeamRules, EarlyStopping
from quire.types.step import Floats, Ints
from toy_decoding import BeamQuestion, beam_answers
from toy_model import VOCAB, all_logprobs

EOS: Ending = ("stop", None)


def search(width: int, penalty: float = 1.0, stopping: EarlyStopping = False, *, length: int = 10) -> BeamSearch:
    return BeamSearch(BeamRules(width, penalty, stopping), length, num_ends=1, vocab_size=100)


def lines(*beams: dict[int, float]) -> tuple[Ints, Floats]:
    """Candidates of each beam, best first."""
    return (
        np.array([list(beam) for beam in beams], dtype=np.int32),
        np.array([list(beam.values()) for beam in beams], dtype=np.float32),
    )


def finished_scores(found: BeamSearch) -> list[float]:
    """Of the finished hypotheses."""
    return [found.score(one.logprob, len(one.token_ids)) for one in found.finished]


def ends_at(tokens: Collection[int]) -> EndOf:
    return lambda parent, token: EOS if token in tokens else None


def test_the_likeliest_continuations_of_all_beams_go_on_best_first() -> None:
    found = search(2)
    assert found.advance([[]], *lines({5: -1.0, 6: -2.0, 7: -3.0}), ends_at(())) == (
        Child(0, 5, -1.0),
        Child(0, 6, -2.0),
    )
    children = found.advance([[5], [6]], *lines({1: -4.0, 2: -5.0}, {3: -0.5, 4: -1.0}), ends_at(()))
    assert children == (Child(1, 3, -2.5), Child(1, 4, -3.0))


def test_an_end_among_the_first_is_finished_and_others_take_its_place() -> None:
    found = search(2)
    children = found.advance([[]], *lines({0: -1.0, 5: -2.0, 6: -3.0, 7: -4.0}), ends_at({0}))
    assert [child.token for child in children] == [5, 6]
    (one,) = found.finished
    assert (one.token_ids, one.logprob, one.ending) == ((0,), -1.0, EOS)
    assert finished_scores(found) == [-1.0]


def test_an_end_behind_the_first_is_forgotten() -> None:
    found = search(2)
    children = found.advance([[]], *lines({5: -1.0, 6: -2.0, 0: -3.0, 7: -4.0}), ends_at({0}))
    assert [child.token for child in children] == [5, 6]
    assert found.finished == []


def test_at_the_limit_the_first_are_finished_whatever_they_end_with() -> None:
    found = search(2, length=1)
    assert found.advance([[]], *lines({5: -1.0, 0: -2.0, 6: -3.0, 7: -4.0}), ends_at({0})) == ()
    assert [(one.token_ids, one.ending) for one in found.finished] == [((5,), ("length", None)), ((0,), EOS)]


@pytest.mark.parametrize(("penalty", "score"), [(0.0, -6.0), (1.0, -3.0), (2.0, -1.5), (-1.0, -12.0)])
def test_the_length_penalty_divides_by_the_generated_tokens(penalty: float, score: float) -> None:
    found = search(1, penalty, length=2)
    found.advance([[]], *lines({5: -2.0, 6: -7.0}), ends_at(()))
    assert found.advance([[5]], *lines({7: -4.0, 8: -9.0}), ends_at(())) == ()
    assert finished_scores(found) == [score]


@pytest.mark.parametrize(
    ("stopping", "penalty", "goes_on"),
    [(True, 1.0, False), (False, 1.0, False), ("never", 1.0, True), ("never", 0.0, False), (False, 2.0, False)],
)
def test_a_full_search_goes_on_only_while_it_may_improve(
    stopping: EarlyStopping, penalty: float, goes_on: bool
) -> None:
    """A finished hypothesis of -1; the beam that lives has -2, and at ten tokens might be at -0.2."""
    found = search(1, penalty, stopping)
    children = found.advance([[]], *lines({0: -1.0, 5: -2.0}), ends_at({0}))
    assert bool(children) == goes_on


@pytest.mark.parametrize(("stopping", "goes_on"), [(True, False), (False, True), ("never", True)])
def test_early_stopping_ends_a_full_search_even_if_a_better_beam_lives(stopping: EarlyStopping, goes_on: bool) -> None:
    found = search(2, 1.0, stopping)
    assert found.advance([[]], *lines({0: -1.0, 5: -1.9, 6: -3.0}), ends_at({0}))
    children = found.advance([[5], [6]], *lines({7: -0.1, 0: -0.3}, {8: -5.0, 9: -6.0}), ends_at({0}))
    assert len(found.finished) == 2
    assert bool(children) == goes_on


@pytest.mark.parametrize("penalty", [-2.0, -0.5, 0.0, 0.5, 1.0, 3.0])
def test_sort_keys_compare_hypotheses_as_their_scores_do(penalty: float) -> None:
    found, rng = search(1, penalty), random.Random(0)
    drawn = [(rng.choice([0.0, -1e-9, -0.5, -3.0, -80.0, 1.5]), rng.randint(1, 200)) for _ in range(60)]
    for one, other in itertools.combinations(drawn, 2):
        left, right = found.score(*one), found.score(*other)
        if abs(left - right) > 1e-9 * max(abs(left), abs(right)):
            assert (found.sort_key(*one) > found.sort_key(*other)) == (left > right)


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_the_better_of_two_hypotheses_is_known_where_both_scores_over_or_underflow(penalty: float) -> None:
    found, length = search(1, penalty), 100_000
    score = found.score(-2.0, length)
    assert np.isfinite(score)
    assert score == found.score(-3.0, length)
    assert found.sort_key(-2.0, length) > found.sort_key(-3.0, length)
    assert (found.sort_key(-2.0, length) > found.sort_key(-2.0, length - 1)) == (penalty > 0)


def test_finished_hypotheses_are_kept_best_first_and_no_more_than_the_width() -> None:
    found = search(2, 0.0, "never")
    found.advance([[]], *lines({0: -3.0, 5: -4.0, 6: -5.0}), ends_at({0}))
    found.advance([[5], [6]], *lines({0: -0.25, 7: -1.0}, {0: -0.5, 8: -0.75}), ends_at({0}))
    assert [one.logprob for one in found.finished] == [-3.0, -4.25]


def test_a_token_that_is_not_allowed_never_becomes_a_beam() -> None:
    found = search(3)
    children = found.advance([[]], *lines({5: -1.0, 6: -np.inf, 7: -np.inf}), ends_at(()))
    assert [child.token for child in children] == [5]
    assert list(ranked(np.zeros(1, np.float32), *lines({5: -np.inf}))) == []


def test_enough_candidates_are_asked_for_that_the_width_goes_on_whichever_end() -> None:
    assert BeamSearch(BeamRules(4), 10, num_ends=1, vocab_size=100).num_candidates == 8
    assert BeamSearch(BeamRules(4), 10, num_ends=9, vocab_size=100).num_candidates == 13
    assert BeamSearch(BeamRules(4), 10, num_ends=1, vocab_size=5).num_candidates == 5
    assert BeamSearch(BeamRules(4), 10, num_ends=1, vocab_size=100, ends_by_text=True).num_candidates == 16


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 1.7])
@pytest.mark.parametrize("stopping", [True, False, "never"])
def test_a_search_finds_what_all_continuations_together_lead_to(
    width: int, penalty: float, stopping: EarlyStopping
) -> None:
    rules, ends, prompt = BeamRules(width, penalty, stopping), (3, 50, 51, 52), (width, 9)
    found = BeamSearch(rules, 12, len(ends), VOCAB)
    beams: list[list[int]] = [[]]
    while beams:
        scores = np.stack([all_logprobs([*prompt, *beam]) for beam in beams])
        tokens = np.argsort(-scores, axis=1, kind="stable")[:, : found.num_candidates]
        best = np.take_along_axis(scores, tokens, axis=1)
        children = found.advance(beams, tokens.astype(np.int32), best, ends_at(ends))
        beams = [[*beams[child.parent], child.token] for child in children]
    wanted = beam_answers(BeamQuestion(prompt, rules, 12, ends))
    assert [(one.token_ids, one.logprob) for one in found.finished] == [(one.tokens, one.logprob) for one in wanted]
    assert finished_scores(found) == pytest.approx([one.score for one in wanted])
