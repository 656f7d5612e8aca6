"""Beam search: chooses the beams that continue, keeps finished hypotheses, and decides when the search ends. It does
not know rows or blocks. PacedResults calls it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.engine.decoding.controller import Ending
from quire.types.decoding import BeamRules
from quire.types.step import Floats, Ints

_ENDS_BY_TEXT = 8  # additional candidates if stop strings or a grammar may end a beam
_LARGEST = sys.float_info.max

EndOf = Callable[[int, int], Ending | None]  # (beam index, token) -> how the token would end the beam


@dataclass(frozen=True, slots=True)
class Child:
    """A continuation of a beam by one token. `logprob` is the sum over all its tokens."""

    parent: int  # index of the beam that it continues
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]
    logprob: float  # summed
    sort_key: tuple[int, float]  # orders hypotheses as their scores do: see `BeamSearch.sort_key`
    ending: Ending


class BeamSearch:
    """The beam search of one request. It makes the same choices as transformers.

    All beams have the same length. `logprobs` has the summed logprob of each beam, best first.
    """

    def __init__(
        self, rules: BeamRules, max_tokens: int, num_ends: int, vocab_size: int, *, ends_by_text: bool = False
    ) -> None:
        self._rules, self._max_tokens = rules, max_tokens
        # Enough for `width` beams to continue even if all end tokens are candidates. Text endings cannot be counted.
        wanted = rules.width + max(rules.width, num_ends) + (_ENDS_BY_TEXT if ends_by_text else 0)
        self.num_candidates = min(vocab_size, wanted)
        self.logprobs: Floats = np.zeros(1, dtype=np.float32)
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self.length = 0  # tokens every beam has generated

    @property
    def width(self) -> int:
        return self._rules.width

    @property
    def streams_best(self) -> bool:
        return self._rules.stream_best

    def advance(
        self, beams: list[list[int]], token_ids: Ints, next_logprobs: Floats, end_of: EndOf
    ) -> tuple[Child, ...]:
        """Advance the search by one token. `beams` are their generated tokens; `token_ids` [beams, k] are the most
        likely next tokens of each, best first, and `next_logprobs` [beams, k] their logprobs. Returns the beams that
        continue, best first; none: the search ends."""
        self.length += 1
        children: list[Child] = []
        for place, (parent, token, logprob) in enumerate(ranked(self.logprobs, token_ids, next_logprobs)):
            if place >= self.width and len(children) == self.width:
                break
            ending = end_of(parent, token) or (("length", None) if self.length >= self._max_tokens else None)
            if ending is None:
                if len(children) < self.width:
                    children.append(Child(parent, token, logprob))
            elif place < self.width:  # later places are only candidates for beams that continue
                self._finish(Hypothesis((*beams[parent], token), logprob, self.sort_key(logprob, self.length), ending))
        if not children or not self._can_improve(children[0].logprob):
            return ()
        self.logprobs = np.array([child.logprob for child in children], dtype=np.float32)
        return tuple(children)

    def sort_key(self, logprob: float, length: int) -> tuple[int, float]:
        """Return a sort key that orders hypotheses like their scores (logprob / length ** length_penalty), but cannot
        overflow or underflow: the sign of the score, then its logarithm."""
        if logprob == 0.0:
            return 0, 0.0
        magnitude = math.log(abs(logprob)) - self._rules.length_penalty * math.log(max(length, 1))
        return (1, magnitude) if logprob > 0.0 else (-1, -magnitude)

    def score(self, logprob: float, num_tokens: int) -> float:
        """Return the score of a hypothesis: logprob / num_tokens ** length_penalty, or the nearest finite number.
        Only reported; `sort_key` decides."""
        try:
            score = logprob / float(max(num_tokens, 1) ** self._rules.length_penalty)
        except OverflowError:
            return 0.0
        except ZeroDivisionError:
            score = math.copysign(math.inf, logprob) if logprob else 0.0
        return max(-_LARGEST, min(score, _LARGEST))

    def _finish(self, hypothesis: Hypothesis) -> None:
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda one: one.sort_key, reverse=True)
        del self.finished[self.width :]

    def _can_improve(self, best: float) -> bool:
        """Whether the beam with the logprob `best` can still become better than the worst finished hypothesis."""
        rules = self._rules
        if len(self.finished) < self.width:
            return True
        if rules.early_stopping is True:
            return False
        at_its_end = rules.early_stopping == "never" and rules.length_penalty > 0
        length = self._max_tokens if at_its_end else self.length
        return self.sort_key(best, length) > self.finished[-1].sort_key


def ranked(logprobs: Floats, token_ids: Ints, next_logprobs: Floats) -> Iterator[tuple[int, int, float]]:
    """Yield every possible (beam, token, summed logprob), most likely first; equal ones in the order of beams."""
    totals = (logprobs[:, None] + next_logprobs).reshape(-1)
    order = np.argsort(-totals, kind="stable")
    width, tokens = token_ids.shape[1], token_ids.reshape(-1)
    for start in range(0, len(order), width):
        places = order[start : start + width]
        for place, token, total in zip(places.tolist(), tokens[places].tolist(), totals[places].tolist(), strict=True):
            if not math.isfinite(total):
                return
            yield place // width, token, total
