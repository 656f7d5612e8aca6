"""GrammarMatcher: the Matcher of one sequence, implemented with llguidance."""

from __future__ import annotations

import weakref
from bisect import insort
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.types.step import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher

FORCED_TOKENS = 128  # longest forced run that is kept


class LexerOwner(Protocol):
    """The compiled grammar to which a lexer belongs."""

    def renew(self, lexer: Lexer, *, private: bool) -> Lexer | None:
        """Return another lexer in place of one that has reached its limits, or None if the sequence itself is at fault.

        With `private`, the lexer has no other matchers.
        """


class Lexer:
    """One compilation of a grammar. All copies of `start` share one llguidance lexer behind one lock.

    It refers to its owner weakly, so that an unused grammar is freed at once, without a run of the garbage collector.
    """

    __slots__ = ("_owner", "is_retired", "num_masks", "start")

    def __init__(self, start: LLMatcher, owner: LexerOwner | None = None) -> None:
        self.start = start  # at the start of the grammar; never advanced
        self._owner = None if owner is None else weakref.ref(owner)
        self.is_retired = False  # its matchers should move to another lexer of the owner
        self.num_masks = 0  # masks that its matchers have computed

    @property
    def owner(self) -> LexerOwner | None:
        return None if self._owner is None else self._owner()


class GrammarMatcher:
    """The Matcher of a sequence under a grammar. `ends` are the tokens that end this request's sequences.

    **Forced text.** If only one text can follow, llguidance splits it into the tokens that the model's tokenizer would
    choose, and each mask allows only the next of these. The matcher keeps this run of tokens, and makes the masks of
    all its positions from it: one by one, in a batch, or ahead for a draft. It keeps runs when tokens are rolled back
    and consumed again. So the masks of a sequence depend on its tokens alone.

    **Moving.** A matcher keeps its tokens, and can move to the same position in another lexer of the same grammar.
    """

    __slots__ = (
        "_bits",
        "_ended",
        "_mask_at",
        "_num_recovered",
        "_owner",
        "_recovered_at",
        "_runs",
        "_runs_end",
        "_undone",
        "_vocabulary",
        "consumed",
        "ends",
        "lexer",
        "state",
    )

    def __init__(
        self, tokens: GrammarTokens, state: LLMatcher, ends: tuple[int, ...], lexer: Lexer | None = None
    ) -> None:
        """`state`: a copy of the lexer's start. Without `lexer`, the matcher gets a private one."""
        self._vocabulary, self.ends = tokens, ends
        self.state = state  # llguidance's own matcher
        self.lexer = lexer or Lexer(state.deep_copy())
        self._owner = self.lexer.owner  # keeps the grammar alive while the sequence uses it
        self.consumed: list[int] = []  # all tokens so far
        self._undone: list[int] = []  # tokens that were rolled back; the next to be consumed again is last
        self._runs: list[tuple[int, tuple[int, ...]]] = []  # (position, forced tokens from there), by position
        self._runs_end = 0  # no run extends beyond this position
        self._bits: Bits | None = None  # the mask at this position, once computed
        self._mask_at = 0  # position of the mask that llguidance computed last
        # Position at which it last needed another lexer, and how many it took there.
        self._recovered_at, self._num_recovered = -1, 0
        self._ended = False  # by one of `ends`

    # ------------------------------------------------------------------------------------------------- one by one
    def mask(self) -> Bits:
        if self._bits is None:
            forced = self.forced(1)
            self._bits = self._only(forced[0]) if forced else self._allowed()
            self._bits.setflags(write=False)
        return self._bits

    def advance(self, token: int) -> bool:
        if self._ended:
            return False
        if self._undone and self._undone[-1] != token:
            self._leave_undone()
        if self.state.try_consume_tokens([token]) != 1:
            if self.state.is_error() and self.recover():
                return self.advance(token)
            if token not in self.ends or not self.state.is_accepting():
                self.check()
                return False
            self._ended = True
        self.note_consumed(token)
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        if limit <= 0 or self.is_over:
            return ()
        run, place = self._run_here()
        if place == len(run):
            run, place = self.find_run(), 0
        return run[place : place + limit]

    @property
    def is_over(self) -> bool:
        return self._ended or (self.state.is_stopped() and not self.state.is_error())

    def clone(self) -> GrammarMatcher:
        copy = GrammarMatcher(self._vocabulary, self.state.deep_copy(), self.ends, self.lexer)
        copy.consumed, copy._undone, copy._runs = self.consumed.copy(), self._undone.copy(), self._runs.copy()
        copy._bits, copy._mask_at, copy._ended = self._bits, self._mask_at, self._ended
        copy._runs_end = self._runs_end
        return copy

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.consumed)
        if num_tokens == 0:
            return
        start = len(self.consumed) - num_tokens
        self._undone.extend(reversed(self.consumed[start:]))
        del self.consumed[start:]
        self._bits = None
        consumed, self._ended = num_tokens - self._ended, False
        if consumed and not self.state.rollback(consumed) and not self.move(self.lexer):
            self.check()  # rolling back failed, and so did consuming the remaining tokens again

    # --------------------------------------------------------------------------------------------------- in a batch
    def forced_token(self) -> int | None:
        """Return the token that the grammar forces next if a forced run is known or found; otherwise None.

        While a sequence has met no forced text, no run is looked up, because its mask will show one. After that, runs
        are looked up here: the threads that compute masks would have to wait for the GIL to tokenize a forced text.
        """
        if not self._runs:
            return None
        run, place = self._run_here()
        if place == len(run):
            run, place = self.find_run(), 0
        return run[place] if run else None

    def find_run(self) -> tuple[int, ...]:
        """Look up the forced tokens from here on and keep them. Called only where no run is known."""
        found = tuple(self.state.compute_ff_tokens()[:FORCED_TOKENS])
        if self.state.is_error():
            if self.recover():
                return self.find_run()
            self.check()
        if found:
            insort(self._runs, (len(self.consumed), found))
            self._runs_end = max(self._runs_end, len(self.consumed) + len(found))
        return found

    def note_mask(self) -> None:
        """Note that llguidance computes the mask of this position."""
        self._mask_at = len(self.consumed)

    def can_consume_in_batch(self, token: int) -> bool:
        """Whether `state.consume_token` and `note_consumed` are enough to advance by a token."""
        return not self._undone and not self._ended and token not in self.ends

    def note_consumed(self, token: int) -> None:
        """Note that `state` has consumed `token`."""
        if self._runs_end > len(self.consumed):
            self._follow_run(token)
        if self._undone:
            self._undone.pop()
        self.consumed.append(token)
        self._bits = None

    def undo_failure(self) -> None:
        """Restore the state before a token that `state` refused in a batch, which left it in its error state."""
        if not self.move(self.lexer):
            self.recover()

    def move(self, lexer: Lexer) -> bool:
        """Move to another lexer of the same grammar. Returns False and changes nothing if it fails."""
        state = lexer.start.deep_copy()
        consumed = self.consumed[: len(self.consumed) - self._ended]
        if consumed and not state.consume_tokens(consumed):
            return False
        self.state, self.lexer, self._mask_at = state, lexer, 0
        return True

    def recover(self) -> bool:
        """Recover after the lexer, which other sequences share, has reached its limits. Returns False if this sequence
        is at fault.

        A sequence first moves to the lexer to which all others move. If that one breaks at once, others may have nearly
        used it up, so the sequence gets a private lexer. If this breaks too at the same position, the sequence is at
        fault.
        """
        owner = self._owner
        if self._recovered_at != len(self.consumed):
            self._recovered_at, self._num_recovered = len(self.consumed), 0
        while owner is not None and self._num_recovered < 2:
            self._num_recovered += 1
            lexer = owner.renew(self.lexer, private=self._num_recovered == 2)
            if lexer is None:
                return False
            if self.move(lexer):
                return True
        return False

    def check(self) -> None:
        """Raise GrammarError if llguidance has failed for this sequence."""
        if self.state.is_error():
            raise GrammarError(f"structured_outputs: {reason_of(self.state)}")

    # ------------------------------------------------------------------------------------------------- forced runs
    def _run_here(self) -> tuple[tuple[int, ...], int]:
        """Return the run at this position and the index in it; the index equals the run's length if the run is over."""
        position = len(self.consumed)
        if position < self._runs_end:
            for start, run in reversed(self._runs):
                if start <= position:
                    return run, min(position - start, len(run))
        return (), 0

    def _follow_run(self, token: int) -> None:
        """Cut off the run at this position if the consumed token differs from it."""
        run, place = self._run_here()
        if place < len(run) and run[place] != token:
            start = len(self.consumed) - place
            self._runs = [known for known in self._runs if known[0] < start]
            if place:
                self._runs.append((start, run[:place]))

    def _leave_undone(self) -> None:
        """Forget the tokens that were rolled back, because a different token is consumed in their place.

        llguidance keeps the mask that it computed last, and after a rollback it may use the mask of the abandoned path
        for the new one. Computing the mask of this position, which both paths share, replaces it. If llguidance keeps
        none (inside a forced text), a copy of the start consumes all tokens again.
        """
        self._undone.clear()
        position = len(self.consumed)
        self._runs = [known for known in self._runs if known[0] <= position]
        if self._mask_at <= position:
            return
        self._mask_at = position
        if self.state.compute_ff_bytes():
            self.move(self.lexer)
        elif not self.state.is_stopped():
            self._vocabulary.read_mask(self.state)

    # ------------------------------------------------------------------------------------------------------- masks
    def _allowed(self) -> Bits:
        self.note_mask()
        self.lexer.num_masks += 1
        bits, may_end = self._vocabulary.read_mask(self.state)
        if self.state.is_error() and self.recover():
            return self._allowed()
        self.check()
        if may_end:
            for token in self.ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        return bits

    def _only(self, token: int) -> Bits:
        bits = np.zeros(self._vocabulary.num_words, dtype=np.uint32)
        bits[token >> 5] = 1 << (token & 31)
        return bits
