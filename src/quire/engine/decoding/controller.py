"""The StepController of one sequence: masks of its grammar, draft tokens and their verification, and stop strings. Also
defines how a sequence ends (Ending) and fails (Fault)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.engine.decoding.stop_text import StopText
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, DraftProposer
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import FinishReason
from quire.types.sampling import TokenRules
from quire.types.step import Bits

Ending = tuple[FinishReason, int | str | None]  # finish reason and stop reason
_OVER: Ending = ("stop", None)
_FULL: Ending = ("length", None)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, and the masks of allowed tokens for their samples: `masks[i]` applies after `draft[:i]`."""

    draft: tuple[int, ...] = ()
    masks: tuple[Bits, ...] = ()  # one more than draft tokens; empty: all tokens are allowed


class Verified(NamedTuple):
    """The verified result of a paced step: the new tokens of the sequence, its ending (None if it continues), and the
    numbers of draft tokens that were verified and accepted."""

    tokens: tuple[int, ...]
    ending: Ending | None = None
    num_drafted: int = 0
    num_accepted: int = 0


_NO_PROPOSAL = Proposal()


class StepController:
    """Controls one sequence: its grammar, its draft proposer, and the stop strings of ranked samples. A sequence
    without any of these has the controller PLAIN, whose methods are never called.

    A sequence that only has a grammar is guided: it runs ahead, and only its sampling waits for the mask.
    """

    __slots__ = (
        "_has_forced",
        "_num_forced",
        "_rules",
        "_stops",
        "always_paced",
        "is_guided",
        "matcher",
        "proposer",
    )

    def __init__(
        self,
        rules: TokenRules,
        *,
        matcher: Matcher | None = None,
        proposer: DraftProposer = NO_PROPOSER,
        stops: StopText | None = None,
        always_paced: bool = False,
    ) -> None:
        """`always_paced`: the sequence never runs ahead."""
        self._rules, self.matcher, self.proposer, self._stops = rules, matcher, proposer, stops
        self.is_guided = matcher is not None and proposer is NO_PROPOSER and stops is None and not always_paced
        self.always_paced = always_paced or stops is not None or (matcher is not None and not self.is_guided)
        self._num_forced = 0  # how many tokens of the last draft the grammar forces
        self._has_forced = False  # the grammar forces enough tokens for a draft

    @property
    def num_ahead(self) -> int:
        """How many tokens the sequence may run ahead before the scheduler asks again; 0: it must be paced."""
        if self.is_guided:
            return 0 if self._has_forced else FOREVER
        return 0 if self.always_paced else self.proposer.num_ahead

    def look_for_forced(self, least: int | None) -> bool:
        """Return whether the grammar forces at least `least` tokens from here on. If so, a guided sequence is paced,
        and one step verifies all of them as a draft. `least` None: the sequence runs ahead in any case. Raises
        GrammarError."""
        matcher = self.matcher
        self._has_forced = False
        if least is not None and matcher is not None and not matcher.is_over:
            self._has_forced = len(matcher.forced(least)) >= least
        return self._has_forced

    def clone(self) -> StepController:
        """Return a controller for a fork of the sequence."""
        return StepController(
            self._rules,
            matcher=None if self.matcher is None else self.matcher.clone(),
            proposer=self.proposer.clone(),
            stops=self._stops,
            always_paced=self.always_paced,
        )

    def close(self) -> None:
        """Free what is kept for the sequence, which has ended."""
        self.proposer.close()

    # ------------------------------------------------------------------------------------------------ before a step
    def propose(self, limit: int) -> Proposal:
        """Return at most `limit` draft tokens to verify, and the masks of their samples. Raises GrammarError."""
        guess = self._before_end(self.proposer.propose(limit)[:limit]) if limit > 0 else ()
        matcher = self.matcher
        if matcher is None:
            return Proposal(guess) if guess else _NO_PROPOSAL
        forced = self._before_end(matcher.forced(limit)) if limit > 0 else ()
        wanted = guess if guess[: len(forced)] == forced else forced
        draft: list[int] = []
        masks = [matcher.mask()]
        for place, token in enumerate(wanted, 1):
            if not matcher.advance(token):
                break
            if matcher.is_over:  # nothing follows the last token, so it is sampled, not drafted
                matcher.rollback(1)
                break
            draft.append(token)
            masks.append(_only(forced[place], len(masks[0])) if place < len(forced) else matcher.mask())
        matcher.rollback(len(draft))
        self._num_forced = min(len(forced), len(draft))
        return Proposal(tuple(draft), tuple(masks))

    def num_to_draft(self, limit: int) -> int:
        """Return how many tokens the runtime must draft after the step."""
        return min(self.proposer.num_to_draft(limit), limit) if limit > 0 else 0

    # ------------------------------------------------------------------------------------------------- after a step
    def verify(self, sampled: Sequence[int], draft: Sequence[int], room: int) -> Verified:
        """Verify a draft: accept the sampled tokens up to and including the first that differs from the draft.

        `sampled` has a token for each draft position and one after them. The sequence ends after `room` tokens. Raises
        GrammarError.
        """
        taken: list[int] = []
        for place, token in enumerate(sampled):
            taken.append(token)
            ending = self.accept(token) or (_FULL if len(taken) == room else None)
            if ending is not None or place == len(draft) or token != draft[place]:
                break
        num_right = len(taken) - 1 + (len(taken) <= len(draft) and taken[-1] == draft[len(taken) - 1])
        drafted, accepted = len(draft) - self._num_forced, max(num_right - self._num_forced, 0)
        self._num_forced = 0
        if drafted > 0:
            self.proposer.result(drafted, accepted)
        self.proposer.observe(taken)
        return Verified(tuple(taken), ending, max(drafted, 0), accepted)

    def ending_with(self, token: int) -> Ending | None:
        """Return how `token` would end the sequence, or None. Changes nothing. Raises GrammarError."""
        if token in self._rules.end_ids:
            return explain_end(token, self._rules)
        if self._stops is not None and (stop := self._stops.push(token)[1]) is not None:
            return "stop", stop
        if self.matcher is None:
            return None
        self._advance_matcher(self.matcher, token)
        is_over = self.matcher.is_over
        self.matcher.rollback(1)
        return _OVER if is_over else None

    def accept(self, token: int) -> Ending | None:
        """Accept the next token. Returns how it ends the sequence, or None. Raises GrammarError."""
        if token in self._rules.end_ids:
            return explain_end(token, self._rules)
        stop = None
        if self._stops is not None:
            self._stops, stop = self._stops.push(token)
        matcher = self.matcher
        if matcher is not None:
            self._advance_matcher(matcher, token)
        if stop is not None:
            return "stop", stop
        return _OVER if matcher is not None and matcher.is_over else None

    def _advance_matcher(self, matcher: Matcher, token: int) -> None:
        if not matcher.advance(token):
            raise GrammarError(f"structured_outputs: token {token} was chosen where the grammar does not allow it")

    def _before_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Cut draft tokens before the first end token. Nothing can follow an end token, so it is sampled, not
        drafted."""
        for place, token in enumerate(tokens):
            if token in self._rules.end_ids:
                return tokens[:place]
        return tokens


PLAIN = StepController(TokenRules())


def _only(token: int, words: int) -> Bits:
    bits = np.zeros(words, dtype=np.uint32)
    bits[token // 32] = np.uint32(1 << (token % 32))
    return bits


def explain_end(token: int, rules: TokenRules) -> tuple[FinishReason, int | None]:
    """Return the finish reason and the stop reason of a sequence that ended with `token`."""
    if token not in rules.end_ids:
        return "length", None
    return "stop", None if token in rules.eos_ids else token


class Fault(NamedTuple):
    """The error of a request whose own code failed. `invalid_field` is the invalid field of the request, or "" if the
    request is valid."""

    reason: str
    invalid_field: str = ""


def fault_of(error: Exception) -> Fault:
    """Return the Fault for an exception raised in a request's own code."""
    if isinstance(error, InvalidRequest):
        return Fault(str(error), error.field)
    if isinstance(error, GrammarError):
        return Fault(str(error), "structured_outputs")
    return Fault(str(error) if isinstance(error, QuireError) else f"the request failed inside the engine: {error!r}")
