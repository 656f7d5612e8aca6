"""Which draft tokens a sequence is given, which tokens it may choose, and how a step's samples are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.engine.decoding.controller import PLAIN, StepController, fault_of
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.stop_text import StopRules, StopText
from quire.engine.decoding.vocabulary import Vocabulary
from quire.engine.speculation.proposer import FOREVER
from quire.types.errors import InvalidRequest, OutOfBlocks
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Bits

RULES = TokenRules(end_ids=(0, 1), eos_ids=(0,))


@dataclass
class Guess:
    """Proposes the same tokens every time, and notes what it is told."""

    tokens: tuple[int, ...]
    noted: list[object] = field(default_factory=list)
    num_ahead: int = 0
    is_observed: bool = False
    is_closed: bool = False

    def observe(self, tokens: Sequence[int]) -> None:
        self.noted.append(tuple(tokens))

    def propose(self, limit: int) -> tuple[int, ...]:
        return self.tokens[:limit]

    def num_to_draft(self, limit: int) -> int:
        return min(3, limit)

    def offer(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self.noted.append((num_drafted, "of which", num_accepted))

    def clone(self) -> Guess:
        return Guess(self.tokens)

    def close(self) -> None:
        self.is_closed = True


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


def stop_text(*stops: str) -> StopText:
    """Every token is a letter, from `a` on."""
    words = [bytes([97 + token % 26]) for token in range(32)]
    return StopText(StopRules.of(SamplingParams(stop=list(stops)), RULES, Vocabulary(words, frozenset(), (), list)))


def test_a_sequence_that_nothing_controls_runs_ahead_for_good() -> None:
    assert PLAIN.num_ahead == FOREVER
    assert not PLAIN.is_guided


def test_a_sequence_runs_ahead_for_as_long_as_its_proposer_says() -> None:
    assert StepController(RULES, proposer=Guess((), num_ahead=4)).num_ahead == 4
    assert StepController(RULES, proposer=Guess((), num_ahead=4), always_paced=True).num_ahead == 0
    assert StepController(RULES, proposer=Guess((), num_ahead=4), stops=stop_text("b")).num_ahead == 0
    assert StepController(RULES, proposer=Guess((), num_ahead=4), matcher=Only(((5,),))).num_ahead == 0


def test_a_sequence_that_only_a_grammar_controls_is_guided_and_runs_ahead() -> None:
    controller = StepController(RULES, matcher=Only(((5, 6), (7, 8))))
    assert controller.is_guided
    assert controller.num_ahead == FOREVER
    assert controller.clone().is_guided
    for other in ({"proposer": Guess(())}, {"stops": stop_text("b")}, {"always_paced": True}):
        held = StepController(RULES, matcher=Only(((5, 6),)), **other)  # type: ignore[arg-type]
        assert (held.is_guided, held.num_ahead) == (False, 0)
        assert (held.clone().is_guided, held.clone().num_ahead) == (False, 0)


def test_a_guided_sequence_is_paced_while_its_grammar_forces_enough_tokens() -> None:
    controller = StepController(RULES, matcher=Only(((5, 6, 7, 8), (5, 6, 7, 9))))
    assert not controller.look_for_forced(4)
    assert controller.num_ahead == FOREVER
    assert controller.look_for_forced(3)
    assert controller.num_ahead == 0
    assert not controller.look_for_forced(None)
    assert controller.num_ahead == FOREVER, "it was not to look"
    assert controller.look_for_forced(3)
    assert controller.verify((5, 6, 7, 9), (5, 6, 7), room=9).ending == ("stop", None)
    assert not controller.look_for_forced(1), "a grammar that is over forces nothing"
    assert not PLAIN.look_for_forced(1)


def test_ranked_text_ends_with_its_stop_string_and_only_the_clone_that_has_it() -> None:
    controller = StepController(RULES, stops=stop_text("fg"))
    assert controller.accept(5) is None
    other = controller.clone()
    assert controller.ending_with(6) == ("stop", "fg")
    assert controller.accept(7) is None
    assert controller.accept(6) is None, "the string was begun and not completed"
    assert other.accept(6) == ("stop", "fg")


def test_a_controller_that_is_closed_closes_its_proposer() -> None:
    guess = Guess(())
    StepController(RULES, proposer=guess).close()
    assert guess.is_closed


def test_a_request_is_told_whose_fault_its_end_was() -> None:
    assert fault_of(GrammarError("no text matches")).invalid_field == "structured_outputs"
    assert fault_of(InvalidRequest("stop", "is too long", "shorten it")) == ("stop: is too long; shorten it", "stop")
    assert fault_of(OutOfBlocks("full")) == ("full", "")
    reason, invalid_field = fault_of(ValueError("odd"))
    assert "failed inside the engine" in reason
    assert "odd" in reason
    assert invalid_field == ""


@pytest.mark.parametrize(
    ("sampled", "taken", "right"),
    [((5, 6, 7), (5, 6, 7), 2), ((5, 9, 7), (5, 9), 1), ((9, 6, 7), (9,), 0)],
)
def test_a_draft_is_taken_as_far_as_it_was_sampled_and_one_token_more(
    sampled: tuple[int, ...], taken: tuple[int, ...], right: int
) -> None:
    guess = Guess((5, 6))
    verified = StepController(RULES, proposer=guess).verify(sampled, (5, 6), room=9)
    assert (verified.tokens, verified.ending) == (taken, None)
    assert (verified.num_drafted, verified.num_accepted) == (2, right)
    assert guess.noted == [(2, "of which", right), taken]


def test_an_end_inside_a_draft_cuts_the_rest() -> None:
    controller = StepController(RULES, proposer=Guess(()))
    assert controller.verify((5, 1, 7), (5, 1), room=9).ending == ("stop", 1)
    assert controller.verify((5, 0, 7), (5, 0), room=9).tokens == (5, 0)
    assert controller.verify((5, 0, 7), (5, 0), room=9).ending == ("stop", None)
    assert controller.verify((5, 6, 7), (5, 6), room=2).tokens == (5, 6)
    assert controller.verify((5, 6, 7), (5, 6), room=2).ending == ("length", None)
    assert controller.verify((5, 1, 7), (5, 1), room=2).ending == ("stop", 1)


def test_a_token_that_ends_the_sequence_is_never_drafted() -> None:
    assert StepController(RULES, proposer=Guess((5, 1, 6))).propose(9).draft == (5,)


def test_a_draft_keeps_within_its_limit() -> None:
    controller = StepController(RULES, proposer=Guess((5, 6, 7)))
    assert controller.propose(2).draft == (5, 6)
    assert controller.propose(0).draft == ()
    assert controller.num_to_draft(2) == 2
    assert controller.num_to_draft(0) == 0


def test_every_position_of_a_draft_has_its_mask_and_forbidden_tokens_cut_it() -> None:
    controller = StepController(RULES, matcher=Only(((5, 6, 7, 8), (5, 9, 7))), proposer=Guess((5, 6, 9)))
    proposal = controller.propose(9)
    assert proposal.draft == (5, 6)
    assert allowed(proposal.masks) == [{5}, {6, 9}, {7}]
    assert controller.propose(9) == proposal, "proposing moved the grammar"


def test_forced_tokens_come_before_guesses_and_do_not_count_as_drafted() -> None:
    guess = Guess((4, 4))
    controller = StepController(RULES, matcher=Only(((5, 6, 7), (5, 6, 8, 9))), proposer=guess)
    proposal = controller.propose(9)
    assert proposal.draft == (5, 6)
    assert allowed(proposal.masks) == [{5}, {6}, {7, 8}]
    verified = controller.verify((5, 6, 8), (5, 6), room=9)
    assert (verified.tokens, verified.num_drafted) == ((5, 6, 8), 0)
    assert guess.noted == [(5, 6, 8)]


def test_a_guess_that_begins_as_is_forced_goes_further() -> None:
    guess = Guess((5, 6, 8))
    controller = StepController(RULES, matcher=Only(((5, 6, 7), (5, 6, 8, 9, 9))), proposer=guess)
    assert controller.propose(9).draft == (5, 6, 8)
    verified = controller.verify((5, 6, 8, 9), (5, 6, 8), room=9)
    assert (verified.num_drafted, verified.num_accepted) == (1, 1)


def test_the_token_that_completes_a_grammar_is_sampled_and_ends_the_sequence() -> None:
    controller = StepController(RULES, matcher=Only(((5, 6),)))
    proposal = controller.propose(9)
    assert proposal.draft == (5,)
    assert allowed(proposal.masks) == [{5}, {6}]
    assert controller.verify((5, 6), (5,), room=9).ending == ("stop", None)


def test_a_token_that_the_grammar_forbids_is_an_error_of_the_request() -> None:
    with pytest.raises(GrammarError, match="token 7"):
        StepController(RULES, matcher=Only(((5, 6),))).verify((7,), (), room=9)


def test_peeking_changes_nothing_and_a_clone_goes_its_own_way() -> None:
    controller = StepController(RULES, matcher=Only(((5,), (6, 7))))
    other = controller.clone()
    assert controller.ending_with(5) == ("stop", None)
    assert controller.ending_with(6) is None
    assert controller.ending_with(1) == ("stop", 1)
    assert controller.accept(6) is None
    assert controller.ending_with(7) == ("stop", None)
    assert other.ending_with(5) == ("stop", None)


def test_what_the_runtime_drafted_is_proposed_next() -> None:
    controller = StepController(RULES, proposer=Guess(()))
    assert controller.num_to_draft(2) == 2
    controller.proposer.offer([7, 8])
    assert controller.propose(9).draft == (7, 8)
