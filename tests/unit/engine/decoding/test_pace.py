"""What one sequence is guessed and allowed to say, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.lookahead import FOREVER
from quire.engine.decoding.pace import PLAIN, Pacer
from quire.types.sampling import TokenRules
from quire.types.step import Bits

RULES = TokenRules(end_ids=(0, 1), eos_ids=(0,))


@dataclass
class Guess:
    """Proposes the same tokens every time, and writes down what it hears."""

    tokens: tuple[int, ...]
    heard: list[object] = field(default_factory=list)
    num_ahead: int = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self.heard.append(tuple(tokens))

    def propose(self, limit: int) -> tuple[int, ...]:
        return self.tokens[:limit]

    def order(self, limit: int) -> int:
        return min(3, limit)

    def offer(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self.heard.append((num_drafted, "of which", num_accepted))

    def clone(self) -> Guess:
        return Guess(self.tokens)


@dataclass
class Only:
    """A grammar that is one of some texts. Its mask is the bits of what may come."""

    texts: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...] = ()

    def _next(self) -> set[int]:
        count = len(self.tokens)
        return {text[count] for text in self.texts if text[:count] == self.tokens and len(text) > count}

    def mask(self) -> Bits:
        assert not self.is_over
        return np.array([sum(1 << token for token in self._next())], dtype=np.uint32)

    def advance(self, token: int) -> bool:
        if token not in self._next():
            return False
        self.tokens += (token,)
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        ahead = Only(self.texts, self.tokens)
        while len(ahead.tokens) - len(self.tokens) < limit and len(choices := ahead._next()) == 1:
            ahead.tokens += tuple(choices)
        return ahead.tokens[len(self.tokens) :]

    @property
    def is_over(self) -> bool:
        return self.tokens in self.texts

    def clone(self) -> Only:
        return Only(self.texts, self.tokens)

    def rollback(self, num_tokens: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - num_tokens]


def allowed(masks: Sequence[Bits]) -> list[set[int]]:
    return [{token for token in range(32) if int(mask[0]) >> token & 1} for mask in masks]


def test_a_sequence_without_rules_of_its_own_runs_ahead_for_good() -> None:
    assert PLAIN.num_ahead == FOREVER
    assert Pacer(RULES, held=True).num_ahead == 0
    assert Pacer(RULES, lookahead=Guess((), num_ahead=4)).num_ahead == 4
    assert Pacer(RULES, lookahead=Guess((), num_ahead=4), matcher=Only(((5,),))).num_ahead == 0


@pytest.mark.parametrize(
    ("sampled", "taken", "right"),
    [((5, 6, 7), (5, 6, 7), 2), ((5, 9, 7), (5, 9), 1), ((9, 6, 7), (9,), 0)],
)
def test_a_draft_is_taken_as_far_as_it_was_sampled_and_one_token_more(
    sampled: tuple[int, ...], taken: tuple[int, ...], right: int
) -> None:
    guess = Guess((5, 6))
    verdict = Pacer(RULES, lookahead=guess).judge(sampled, (5, 6), room=9)
    assert (verdict.tokens, verdict.ending) == (taken, None)
    assert (verdict.num_drafted, verdict.num_accepted) == (2, right)
    assert guess.heard == [(2, "of which", right), taken]


def test_an_end_inside_a_draft_cuts_the_rest() -> None:
    pacer = Pacer(RULES, lookahead=Guess(()))
    assert pacer.judge((5, 1, 7), (5, 1), room=9).ending == ("stop", 1)
    assert pacer.judge((5, 0, 7), (5, 0), room=9).tokens == (5, 0)
    assert pacer.judge((5, 0, 7), (5, 0), room=9).ending == ("stop", None)
    assert pacer.judge((5, 6, 7), (5, 6), room=2).tokens == (5, 6)
    assert pacer.judge((5, 6, 7), (5, 6), room=2).ending == ("length", None)
    assert pacer.judge((5, 1, 7), (5, 1), room=2).ending == ("stop", 1)


def test_a_token_that_ends_the_sequence_is_never_drafted() -> None:
    assert Pacer(RULES, lookahead=Guess((5, 1, 6))).propose(9).draft == (5,)


def test_a_draft_keeps_within_its_limit() -> None:
    pacer = Pacer(RULES, lookahead=Guess((5, 6, 7)))
    assert pacer.propose(2).draft == (5, 6)
    assert pacer.propose(0).draft == ()
    assert pacer.order(2) == 2
    assert pacer.order(0) == 0


def test_every_position_of_a_draft_has_its_mask_and_forbidden_tokens_cut_it() -> None:
    pacer = Pacer(RULES, matcher=Only(((5, 6, 7, 8), (5, 9, 7))), lookahead=Guess((5, 6, 9)))
    proposal = pacer.propose(9)
    assert proposal.draft == (5, 6)
    assert allowed(proposal.masks) == [{5}, {6, 9}, {7}]
    assert pacer.propose(9) == proposal, "proposing moved the grammar"


def test_forced_tokens_come_before_guesses_and_do_not_count_as_drafted() -> None:
    guess = Guess((4, 4))
    pacer = Pacer(RULES, matcher=Only(((5, 6, 7), (5, 6, 8, 9))), lookahead=guess)
    proposal = pacer.propose(9)
    assert proposal.draft == (5, 6)
    assert allowed(proposal.masks) == [{5}, {6}, {7, 8}]
    verdict = pacer.judge((5, 6, 8), (5, 6), room=9)
    assert (verdict.tokens, verdict.num_drafted) == ((5, 6, 8), 0)
    assert guess.heard == [(5, 6, 8)]


def test_a_guess_that_begins_as_is_forced_goes_further() -> None:
    guess = Guess((5, 6, 8))
    pacer = Pacer(RULES, matcher=Only(((5, 6, 7), (5, 6, 8, 9, 9))), lookahead=guess)
    assert pacer.propose(9).draft == (5, 6, 8)
    verdict = pacer.judge((5, 6, 8, 9), (5, 6, 8), room=9)
    assert (verdict.num_drafted, verdict.num_accepted) == (1, 1)


def test_the_token_that_completes_a_grammar_is_sampled_and_ends_the_sequence() -> None:
    pacer = Pacer(RULES, matcher=Only(((5, 6),)))
    proposal = pacer.propose(9)
    assert proposal.draft == (5,)
    assert allowed(proposal.masks) == [{5}, {6}]
    assert pacer.judge((5, 6), (5,), room=9).ending == ("stop", None)


def test_a_token_that_the_grammar_forbids_is_an_error_of_the_request() -> None:
    with pytest.raises(GrammarError, match="token 7"):
        Pacer(RULES, matcher=Only(((5, 6),))).judge((7,), (), room=9)


def test_peeking_changes_nothing_and_a_clone_goes_its_own_way() -> None:
    pacer = Pacer(RULES, matcher=Only(((5,), (6, 7))))
    other = pacer.clone()
    assert pacer.peek(5) == ("stop", None)
    assert pacer.peek(6) is None
    assert pacer.peek(1) == ("stop", 1)
    assert pacer.take(6) is None
    assert pacer.peek(7) == ("stop", None)
    assert other.peek(5) == ("stop", None)


def test_what_was_ordered_is_proposed_and_what_ran_ahead_is_heard() -> None:
    guess = Guess(())
    pacer = Pacer(RULES, lookahead=guess)
    pacer.offer([7, 8])
    assert pacer.propose(9).draft == (7, 8)
    pacer.catch_up([1, 2])
    assert guess.heard == [(1, 2)]
