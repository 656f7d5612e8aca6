"""Prompt lookup: what followed the last tokens when they came before may follow them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, Lookahead
from quire.engine.decoding.lookahead_control import NO_DRAFT, Chances, Control, Experience, Length, Rounds
from quire.engine.decoding.lookahead_index import NgramIndex
from quire.types.request import Submit

# Tokens to run ahead where nothing is found; doubles each time. A look costs the sequence a step that it sits out.
_FIRST_LOOK, _LOOK_AFTER_DRAFT, _LONGEST_LOOK = 32, 8, 512
_PRIORS = (0.2, 0.8)  # the chance of a guess after one that was wrong or not made, and after one that was right
_OWN_FORGETS, _ALL_FORGET = (0.8, 0.9), (0.99, 0.99)
_PRIOR_WEIGHT = 4.0  # guesses that a prior counts for beside what was seen
_COMMON_WEIGHTS = (1.0, 2.0)  # guesses that what all sequences saw counts for beside a sequence's own


class NgramLookaheads:
    """Looks up drafts in what each sequence has said so far.

    `runs_ahead`: a sequence that waits for its results loses time, so where nothing is found it runs ahead.
    """

    def __init__(self, config: SpeculationConfig, *, runs_ahead: bool) -> None:
        self._config, self._runs_ahead = config, runs_ahead
        self.control = Control()
        self._all = _Guesses(_ALL_FORGET)

    def begin(self, request: Submit) -> Lookahead:
        if request.sampling.max_tokens == 1:
            return NO_LOOKAHEAD
        return NgramLookahead(
            request.prompt_token_ids, self._config, self.control, self._all, runs_ahead=self._runs_ahead
        )

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.control.note_step(num_tokens, num_samples, seconds)


class _Guesses:
    """Experience with guesses after a wrong one and after a right one."""

    def __init__(self, forgets: tuple[float, float]) -> None:
        self.after = (Experience(forgets[0]), Experience(forgets[1]))


@dataclass(slots=True)
class _Shadow:
    """What would be guessed of the next token, were it worth verifying. It costs nothing to see whether it is right:
    so a sequence that begins to repeat something is noticed without a draft, and one that does not costs none."""

    guess: int | None = None
    was_right: bool = False  # the guess before it


class NgramLookahead:
    """One sequence's drafts. Its tokens are indexed when it is first looked up."""

    def __init__(
        self, prompt: Sequence[int], config: SpeculationConfig, control: Control, common: _Guesses, *, runs_ahead: bool
    ) -> None:
        self._prompt, self._config, self._control, self._runs_ahead = prompt, config, control, runs_ahead
        self._index: NgramIndex | None = None
        self._common, self._own = common, _Guesses(_OWN_FORGETS)
        self._shadow, self._rounds = _Shadow(), Rounds(control, runs_ahead=runs_ahead)
        self._look = _FIRST_LOOK
        self._is_try = False  # what the control said of the draft that was proposed last
        self.num_ahead = _FIRST_LOOK if runs_ahead else 0

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._shadow.guess is not None:
                self._learn(is_right=token == self._shadow.guess)
            self._tokens.extend((token,))
            self._shadow.guess = None
            if len(tokens) > 1:  # nobody asks what follows the others
                self._guess()
        self._rounds.observe(waited=self.num_ahead == 0)
        if self._runs_ahead:
            self.num_ahead = self._looked()

    def propose(self, limit: int) -> tuple[int, ...]:
        guess = self._guess(max(1, limit))
        if limit <= 0:
            return ()
        length, self._is_try = self._length(len(guess))
        return guess[:length]

    def order(self, limit: int) -> int:  # noqa: ARG002 - Lookahead's signature
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        raise AssertionError(f"{len(tokens)} tokens were drafted that nobody ordered")

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._control.note_result(num_drafted, num_accepted, is_try=self._is_try)

    def clone(self) -> NgramLookahead:
        other = NgramLookahead(self._prompt, self._config, self._control, self._common, runs_ahead=self._runs_ahead)
        other._index = None if self._index is None else self._index.clone()
        return other

    @property
    def _tokens(self) -> NgramIndex:
        if self._index is None:
            self._index = NgramIndex(self._prompt, self._config.lookup_min, self._config.lookup_max)
        return self._index

    def _guess(self, limit: int = 1) -> tuple[int, ...]:
        found = self._tokens.find(min(limit, self._config.num_tokens))
        self._shadow.guess = None if found is None else found.tokens[0]
        if found is None:
            self._shadow.was_right = False
        return () if found is None else found.tokens

    def _learn(self, *, is_right: bool) -> None:
        for guesses in (self._own, self._common):
            guesses.after[self._shadow.was_right].add(is_right=is_right)
        self._shadow.was_right = is_right

    def _length(self, limit: int) -> Length:
        """How much of a guess is worth verifying. Nobody knows of a sequence that was never guessed at: its first guess
        is only looked at."""
        if not limit or not (self._shadow.was_right or self._own.after[False].has_any):
            return NO_DRAFT
        chances = Chances(self._chance(after_right=self._shadow.was_right), self._chance(after_right=True))
        return self._control.length(chances, limit, self._rounds.mean)

    def _chance(self, *, after_right: bool) -> float:
        common = self._common.after[after_right].mean(_PRIORS[after_right], _PRIOR_WEIGHT)
        return self._own.after[after_right].mean(common, _COMMON_WEIGHTS[after_right])

    def _looked(self) -> int:
        """How far to run ahead: not at all where there is a draft."""
        if not self._control.allows_drafts:
            return _LONGEST_LOOK
        if self._length(len(self._guess(self._config.num_tokens))).num_tokens:
            self._look = _LOOK_AFTER_DRAFT
            return 0
        look, self._look = self._look, min(2 * self._look, _LONGEST_LOOK)
        return look
