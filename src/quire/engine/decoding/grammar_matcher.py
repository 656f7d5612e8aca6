"""Follows one sequence through its grammar with llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.types.step import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher

FORCED_TOKENS = 128  # that are remembered at once


class GrammarMatcher:
    """A Matcher. Forced tokens are found once per run of them, so that a long fixed text costs no more per token.

    `ends` are the tokens that end this request's sequences: allowed where the grammar may end.
    """

    __slots__ = ("_bits", "_ended", "_ends", "_forced", "_forced_at", "_position", "_state", "_tokens")

    def __init__(self, tokens: GrammarTokens, state: LLMatcher, ends: tuple[int, ...]) -> None:
        self._tokens, self._state, self._ends = tokens, state, ends
        self._position = 0  # tokens taken in
        self._forced: tuple[int, ...] = ()  # at positions from `_forced_at` on
        self._forced_at = -1  # -1: not asked yet
        self._bits: Bits | None = None  # the mask at this position, once found
        self._ended = False  # by one of `ends`

    def mask(self) -> Bits:
        if self._bits is None:
            forced = self.forced(1)
            self._bits = self._only(forced[0]) if forced else self._allowed()
            self._bits.setflags(write=False)
        return self._bits

    def advance(self, token: int) -> bool:
        if self._ended:
            return False
        if self._state.try_consume_tokens([token]) == 1:
            place = self._position - self._forced_at
            if self._forced_at < 0 or place >= len(self._forced) or self._forced[place] != token:
                self._forced, self._forced_at = (), -1
        elif token in self._ends and self._state.is_accepting():
            self._ended = True
        else:
            self._check()
            return False
        self._position += 1
        self._bits = None
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        if limit <= 0 or self.is_over:
            return ()
        is_used_up = bool(self._forced) and self._position == self._forced_at + len(self._forced)
        if self._forced_at < 0 or is_used_up:
            self._forced_at, self._forced = self._position, self._ask_forced()
        start = self._position - self._forced_at
        return self._forced[start : start + limit]

    @property
    def is_over(self) -> bool:
        return self._ended or (self._state.is_stopped() and not self._state.is_error())

    def clone(self) -> GrammarMatcher:
        copy = GrammarMatcher(self._tokens, self._state.deep_copy(), self._ends)
        copy._position, copy._bits, copy._ended = self._position, self._bits, self._ended
        copy._forced, copy._forced_at = self._forced, self._forced_at
        return copy

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._position
        if num_tokens == 0:
            return
        self._position -= num_tokens
        self._bits = None
        if self._position < self._forced_at:
            self._forced, self._forced_at = (), -1
        consumed, self._ended = num_tokens - self._ended, False
        if consumed and not self._state.rollback(consumed):
            self._check()

    def _ask_forced(self) -> tuple[int, ...]:
        found = self._state.compute_ff_tokens()[:FORCED_TOKENS]
        self._check()
        return tuple(found)

    def _allowed(self) -> Bits:
        bits, may_end = self._tokens.read_mask(self._state)
        self._check()
        if may_end:
            for token in self._ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        return bits

    def _only(self, token: int) -> Bits:
        bits = np.zeros(self._tokens.num_words, dtype=np.uint32)
        bits[token >> 5] = 1 << (token & 31)
        return bits

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(f"structured_outputs: {reason_of(self._state)}")
