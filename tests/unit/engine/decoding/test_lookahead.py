from __future__ import annotations

import random

import pytest

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, NoLookaheads
from quire.engine.decoding.lookahead_control import Length
from quire.engine.decoding.lookahead_ngram import NgramLookaheads
from quire.engine.decoding.lookahead_ordered import OrderedLookaheads
from quire.engine.decoding.lookahead_registry import make_lookaheads
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

NGRAM = SpeculationConfig(method="ngram", num_tokens=6)
DRAFT = SpeculationConfig(method="draft_model", num_tokens=4, model="small")


def request(prompt: tuple[int, ...], max_tokens: int = 64) -> Submit:
    return Submit("r", prompt, SamplingParams(max_tokens=max_tokens))


def test_an_ngram_lookahead_proposes_what_followed_before_once_a_guess_was_right() -> None:
    lookahead = NgramLookaheads(NGRAM, runs_ahead=False).begin(request((1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)))
    assert lookahead.num_ahead == 0
    assert lookahead.propose(3) == ()  # nobody knows yet whether this sequence repeats things
    lookahead.observe((3,))
    assert lookahead.propose(3) == (4, 5, 6)
    assert lookahead.propose(0) == ()
    lookahead.result(3, 3)
    lookahead.observe((4, 5, 6, 7))
    assert lookahead.propose(16)[:2] == (8, 9)
    assert lookahead.order(16) == 0


def test_guesses_that_are_wrong_are_not_verified_for_long() -> None:
    rng = random.Random(0)
    lookahead = NgramLookaheads(NGRAM, runs_ahead=False).begin(request(tuple(rng.choices(range(8), k=200))))
    drafted = 0
    for _ in range(300):
        draft = lookahead.propose(8)
        drafted += len(draft)
        if draft:
            lookahead.result(len(draft), 0)
        token = rng.randrange(100, 110)
        lookahead.observe((token, *rng.choices(range(8), k=2)))
    assert drafted < 30


def test_new_text_is_not_guessed_at() -> None:
    lookahead = NgramLookaheads(NGRAM, runs_ahead=False).begin(request(tuple(range(40))))
    for token in range(100, 140):
        assert lookahead.propose(8) == ()
        lookahead.observe((token,))


def test_where_waiting_costs_time_a_sequence_runs_ahead_until_there_is_a_draft() -> None:
    lookahead = NgramLookaheads(NGRAM, runs_ahead=True).begin(request(tuple(range(50))))
    looks = []
    for token in range(100, 105):
        looks.append(lookahead.num_ahead)
        lookahead.observe((token,))
    assert looks[0] > 0
    assert looks[-1] > looks[0]  # ever less often
    lookahead.observe((10, 11, 12, 13))  # of these, the last two could have been guessed
    assert lookahead.num_ahead == 0
    assert lookahead.propose(2) == (14, 15)


def test_a_clone_continues_from_the_same_tokens_alone() -> None:
    lookaheads = NgramLookaheads(NGRAM, runs_ahead=False)
    one = lookaheads.begin(request((1, 2, 3, 4, 5, 6)))
    one.observe((1, 2))
    other = one.clone()
    other.observe((3, 4))
    assert other.propose(2) == (5, 6)
    one.observe((9,))
    assert one.propose(2) == ()


def test_an_ordered_draft_is_proposed_once_and_only_for_what_it_followed() -> None:
    lookahead = OrderedLookaheads(DRAFT, runs_ahead=False).begin(request((1, 2, 3)))
    assert lookahead.propose(8) == ()
    assert 1 <= lookahead.order(8) <= 4
    lookahead.observe((4,))
    lookahead.offer((5, 6, 7))
    assert lookahead.propose(2) == (5, 6)
    lookahead.result(2, 1)
    lookahead.observe((5, 9))
    assert lookahead.propose(8) == ()


def test_a_draft_that_is_ordered_as_a_try_counts_as_one_when_it_is_verified() -> None:
    lookaheads, given, said = OrderedLookaheads(DRAFT, runs_ahead=False), list[bool](), [Length(3, is_try=True)]
    lookaheads.control.length = lambda *_, **__: said[-1]  # type: ignore[method-assign]
    lookaheads.control.note_result = lambda *_, is_try: given.append(is_try)  # type: ignore[method-assign]
    lookahead = lookaheads.begin(request((1, 2, 3)))
    lookahead.order(8)
    lookahead.observe((4,))
    lookahead.offer((5, 6, 7))
    said.append(Length(3))  # the next one pays, and is ordered before the first is verified
    for _ in range(2):
        lookahead.propose(8)
        lookahead.order(8)
        lookahead.result(3, 1)
        lookahead.observe((5, 9))
        lookahead.offer((5, 6, 7))
    assert given == [True, False]


def test_a_model_whose_drafts_fail_is_asked_ever_less() -> None:
    lookaheads = OrderedLookaheads(DRAFT, runs_ahead=True)
    lookahead = lookaheads.begin(request((1, 2, 3), 10_000))
    assert lookahead.num_ahead == 0
    orders = tokens = 0
    while tokens < 4_000:
        if lookahead.num_ahead:
            lookahead.observe((7,) * (ahead := lookahead.num_ahead))
            tokens += ahead
            continue
        ordered = lookahead.order(8)
        orders += ordered > 0
        lookahead.observe((4,))
        lookaheads.note_step(1, 1, 0.01)
        if ordered:
            lookahead.offer((5,) * ordered)
            lookahead.result(len(lookahead.propose(8)), 0)
            lookahead.observe((6,))
            lookaheads.note_step(1 + ordered, 1 + ordered, 0.015)
        tokens += 2
    assert 2 < orders < 40


def test_a_request_for_one_token_is_never_guessed_for() -> None:
    assert NgramLookaheads(NGRAM, runs_ahead=False).begin(request((1, 2), 1)) is NO_LOOKAHEAD
    assert OrderedLookaheads(DRAFT, runs_ahead=False).begin(request((1, 2), 1)) is NO_LOOKAHEAD


@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (2, True)])
def test_the_configuration_chooses_the_way_and_the_depth_whether_to_run_ahead(depth: int, ahead: bool) -> None:
    assert isinstance(make_lookaheads(None, depth), NoLookaheads)
    assert isinstance(make_lookaheads(DRAFT, depth), OrderedLookaheads)
    made = make_lookaheads(NGRAM, depth)
    assert (made.begin(request((1, 2, 3))).num_ahead > 0) == ahead
