"""How one sequence goes on: what it may say, what it is guessed to say, and where its text ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, Lookahead
from quire.engine.decoding.stop_text import StopText
from quire.engine.decoding.stopping import explain_end
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import FinishReason
from quire.types.sampling import TokenRules
from quire.types.step import Bits

Ending = tuple[FinishReason, int | str | None]  # finish reason and stop reason
_OVER: Ending = ("stop", None)
_FULL: Ending = ("length", None)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow, and which ones each of the samples may choose: `masks[i]` holds after `draft[:i]`."""

    draft: tuple[int, ...] = ()
    masks: tuple[Bits, ...] = ()  # one more than the draft has tokens; none: anything may be chosen


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a sequence grew by, why it ended with that, and how its draft fared."""

    tokens: tuple[int, ...]
    ending: Ending | None = None
    num_drafted: int = 0
    num_accepted: int = 0


_NO_PROPOSAL = Proposal()


class Pacer:
    """Belongs to one sequence and knows all its tokens. A sequence without grammar, guesses and ranked text has PLAIN,
    which is asked nothing."""

    __slots__ = ("_held", "_lookahead", "_matcher", "_num_forced", "_rules", "_stops")

    def __init__(
        self,
        rules: TokenRules,
        *,
        matcher: Matcher | None = None,
        lookahead: Lookahead = NO_LOOKAHEAD,
        stops: StopText | None = None,
        held: bool = False,
    ) -> None:
        """`held`: every step waits for the result of the one before, whatever else there is."""
        self._rules, self._matcher, self._lookahead, self._stops = rules, matcher, lookahead, stops
        self._held = held or matcher is not None or stops is not None
        self._num_forced = 0

    @property
    def num_ahead(self) -> int:
        """How many tokens may be generated before this is asked again; 0: it is asked before every step."""
        return 0 if self._held else self._lookahead.num_ahead

    def clone(self) -> Pacer:
        """For a fork."""
        return Pacer(
            self._rules,
            matcher=None if self._matcher is None else self._matcher.clone(),
            lookahead=self._lookahead.clone(),
            stops=self._stops,
            held=self._held,
        )

    # ------------------------------------------------------------------------------------------------ before a step
    def propose(self, limit: int) -> Proposal:
        """At most `limit` tokens to verify, and the masks of their samples. Raises GrammarError."""
        guess = self._before_end(self._lookahead.propose(limit)) if limit > 0 else ()
        matcher = self._matcher
        if matcher is None:
            return Proposal(guess) if guess else _NO_PROPOSAL
        forced = self._before_end(matcher.forced(limit)) if limit > 0 else ()
        wanted = guess if guess[: len(forced)] == forced else forced
        draft: list[int] = []
        masks = [matcher.mask()]
        for place, token in enumerate(wanted, 1):
            if not matcher.advance(token):
                break
            if matcher.is_over:  # nothing is sampled after it, so it is sampled itself
                matcher.rollback(1)
                break
            draft.append(token)
            masks.append(_only(forced[place], len(masks[0])) if place < len(forced) else matcher.mask())
        matcher.rollback(len(draft))
        self._num_forced = min(len(forced), len(draft))
        return Proposal(tuple(draft), tuple(masks))

    def order(self, limit: int) -> int:
        """How many tokens the runtime shall draft after the step."""
        return self._lookahead.order(limit) if limit > 0 else 0

    def offer(self, tokens: Sequence[int]) -> None:
        """What the runtime drafted."""
        self._lookahead.offer(tokens)

    # ------------------------------------------------------------------------------------------------- after a step
    def judge(self, sampled: Sequence[int], draft: Sequence[int], room: int) -> Verdict:
        """Take in what was sampled at each position of a draft and after it, as far as the draft was right.

        `room` is how many tokens may still come. Raises GrammarError.
        """
        taken: list[int] = []
        for place, token in enumerate(sampled):
            taken.append(token)
            ending = self.take(token) or (_FULL if len(taken) == room else None)
            if ending is not None or place == len(draft) or token != draft[place]:
                break
        num_right = len(taken) - 1 + (len(taken) <= len(draft) and taken[-1] == draft[len(taken) - 1])
        drafted, accepted = len(draft) - self._num_forced, max(num_right - self._num_forced, 0)
        self._num_forced = 0
        if drafted > 0:
            self._lookahead.result(drafted, accepted)
        self._lookahead.observe(taken)
        return Verdict(tuple(taken), ending, max(drafted, 0), accepted)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """What was generated while it ran ahead."""
        self._lookahead.observe(tokens)

    def peek(self, token: int) -> Ending | None:
        """How `token` would end the sequence. Changes nothing. Raises GrammarError."""
        if token in self._rules.end_ids:
            return explain_end(token, self._rules)
        if self._stops is not None and (stop := self._stops.push(token)[1]) is not None:
            return "stop", stop
        if self._matcher is None:
            return None
        self._follow(token)
        is_over = self._matcher.is_over
        self._matcher.rollback(1)
        return _OVER if is_over else None

    def take(self, token: int) -> Ending | None:
        """One token further; how it ends the sequence, if it does. Raises GrammarError."""
        if token in self._rules.end_ids:
            return explain_end(token, self._rules)
        stop = None
        if self._stops is not None:
            self._stops, stop = self._stops.push(token)
        if self._matcher is not None:
            self._follow(token)
        if stop is not None:
            return "stop", stop
        return _OVER if self._matcher is not None and self._matcher.is_over else None

    def _follow(self, token: int) -> None:
        assert self._matcher is not None
        if not self._matcher.advance(token):
            raise GrammarError(f"structured_outputs: token {token} was chosen where the grammar does not allow it")

    def _before_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """A token that ends the sequence is sampled, not drafted: nothing could follow it."""
        for place, token in enumerate(tokens):
            if token in self._rules.end_ids:
                return tokens[:place]
        return tokens


PLAIN = Pacer(TokenRules())


def _only(token: int, words: int) -> Bits:
    bits = np.zeros(words, dtype=np.uint32)
    bits[token // 32] = np.uint32(1 << (token % 32))
    return bits


class Fault(NamedTuple):
    """What a request is told that its own decoding ended, and the field at fault if it asked for what cannot be."""

    reason: str
    refused: str = ""


def fault_of(error: Exception) -> Fault:
    if isinstance(error, GrammarError | InvalidRequest):
        return Fault(str(error), "structured_outputs")
    return Fault(str(error) if isinstance(error, QuireError) else f"the request failed inside the engine: {error!r}")
