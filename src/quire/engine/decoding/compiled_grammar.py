"""A compiled grammar with one or more lexers, among which its matchers are distributed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher, Lexer
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MASK_THREADS = 16
ROWS_PER_LEXER = 8  # an additional lexer is only worth its cost for this many more rows
QUICK_SECONDS = 0.05  # a grammar that took longer to compile is never compiled again
SLICE_AFTER = 16_384  # number of masks that together cost as much as building slices
MOVED_TOKENS = 256  # tokens that one batch may replay to move matchers to other lexers, about 0.3 ms
MAX_MOVED_TOKENS = 1_024  # a longer sequence stays with its lexer


def mask_threads() -> int:
    """Return how many threads compute masks by default. Two cores are left for the engine and its clients."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_MASK_THREADS, cores - 2))


class LexerBuilder(Protocol):
    """Compiles additional lexers of a grammar later, on the compiler's thread. GrammarCompiler implements it."""

    def add_lexer(self, grammar: CompiledGrammar) -> None:
        """Schedule a call of `grammar.add_lexer`, which happens only if there is memory for one more lexer."""

    def add_slices(self, grammar: CompiledGrammar) -> None:
        """Schedule a call of `grammar.add_slices`."""


class CompiledGrammar:
    """One grammar, compiled once or several times.

    All matchers of one lexer share its lock, so threads that compute masks in parallel need several lexers. A grammar
    starts with one. When many rows follow it, it asks its builder for more lexers and moves matchers to them; when it
    has computed many masks, it asks for lexers with slices made for it. The engine's thread calls all methods except
    `add_lexer` and `add_slices`, which the compiler's thread calls, and `renew`, which both may call.
    """

    def __init__(
        self, text: str, tokens: GrammarTokens, *, max_lexers: int = 1, builder: LexerBuilder | None = None
    ) -> None:
        """Compile the grammar. Raises GrammarError on failure. Without a builder the grammar keeps its one lexer."""
        self._text, self._tokens, self._max_lexers, self._builder = text, tokens, max_lexers, builder
        self._tokenizer = tokens.tokenizer
        self._lock = threading.Lock()  # held while `lexers` changes
        began = time.thread_time()  # waiting for the GIL does not count
        self.lexers: tuple[Lexer, ...] = (self._compile(),)
        self.seconds = time.thread_time() - began  # processor time that compiling took
        self.used_at = time.monotonic()  # when its matchers were last in a batch
        self._num_asked = 1  # lexers, including those that were requested
        self._has_asked_slices = False
        self._next = 0

    @property
    def num_extra(self) -> int:
        return len(self.lexers) - 1

    def matcher(self, ends: tuple[int, ...]) -> GrammarMatcher:
        """Return a matcher at the start of the grammar."""
        ends = tuple(token for token in ends if token < self._tokens.vocab_size)  # a tokenizer may have more tokens
        lexers, self._next = self.lexers, self._next + 1
        lexer = lexers[self._next % len(lexers)]
        return GrammarMatcher(self._tokens, lexer.start.deep_copy(), ends, lexer)

    def balance(self, followers: Mapping[Lexer, Sequence[GrammarMatcher]]) -> None:
        """Prepare for a batch of masks: request additional lexers and slices if they would make later batches faster,
        and move a few matchers.

        `followers`: the matchers in the batch, by lexer.
        """
        self.used_at, budget = time.monotonic(), MOVED_TOKENS
        num_rows = sum(map(len, followers.values()))
        self._ask_for_more(num_rows)
        lexers = self.lexers
        crowded = [lexer for lexer in followers if lexer.is_retired]
        if not crowded and len(lexers) == 1:
            return
        share = -(-num_rows // len(lexers))
        counts = {lexer: len(followers.get(lexer, ())) for lexer in lexers}
        spare = {lexer: count - share for lexer, count in counts.items() if count > share}
        for lexer in (*crowded, *spare):
            leaving = followers[lexer] if lexer.is_retired else followers[lexer][-spare[lexer] :]
            for matcher in leaving:
                target = min(counts, key=counts.__getitem__)
                length = len(matcher.consumed)
                if counts[target] >= share or length > MAX_MOVED_TOKENS:
                    continue
                if budget <= 0:
                    return
                if matcher.move(target):
                    counts[target] += 1
                    budget -= max(length, 8)

    def renew(self, lexer: Lexer, *, private: bool) -> Lexer | None:
        """Return another lexer for a matcher, or None if its own is intact or the grammar takes too long to compile
        again.

        What breaks a lexer (too many states, too much work in one mask) breaks it for all its matchers.
        """
        with self._lock:
            if not lexer.is_retired and not self._is_broken(lexer):
                return None
            if private:
                return self._compile() if self.seconds <= QUICK_SECONDS else None
            sound = tuple(known for known in self.lexers if not self._is_broken(known))
            if not sound and self.seconds > QUICK_SECONDS:
                return None
            for known in self.lexers:
                known.is_retired |= known not in sound
            self.lexers = sound or (self._compile(),)
            self._num_asked = len(self.lexers)
            return self.lexers[0]

    # ----------------------------------------------------------------------------------- on the compiler's thread
    def add_lexer(self) -> None:
        """Compile the grammar once more."""
        fresh = self._compile()
        with self._lock:
            if len(self.lexers) < self._max_lexers:
                self.lexers = (*self.lexers, fresh)

    def add_slices(self) -> None:
        """Compile the grammar with slices made for it, if there are any, and retire all lexers without them."""
        slices = self._tokens.own_slices(self._text)
        if not slices:
            return
        self._tokenizer = self._tokens.sliced(slices)
        fresh = [self._compile() for _ in self.lexers]
        with self._lock:
            for lexer in self.lexers:
                lexer.is_retired = True
            self.lexers = tuple(fresh)

    def shrink(self) -> None:
        """Remove all lexers but one. Their matchers move to it at their next batch."""
        with self._lock:
            for lexer in self.lexers[1:]:
                lexer.is_retired = True
            self.lexers = self.lexers[:1]
            self._num_asked = 1

    def _ask_for_more(self, num_rows: int) -> None:
        if self._builder is None or self.seconds > QUICK_SECONDS:
            return
        wanted = min(self._max_lexers, num_rows // ROWS_PER_LEXER)
        while self._num_asked < wanted:
            self._num_asked += 1
            self._builder.add_lexer(self)
        if not self._has_asked_slices and sum(lexer.num_masks for lexer in self.lexers) >= SLICE_AFTER:
            self._has_asked_slices = True
            self._builder.add_slices(self)

    def _compile(self) -> Lexer:
        """Compile the grammar and compute its first mask, which builds most of the state that later masks need."""
        start = self._tokens.begin(self._text, self._tokenizer)
        if not start.is_error():
            self._tokens.read_mask(start)
        if start.is_error():
            raise GrammarError(f"structured_outputs: {reason_of(start) or 'cannot be compiled'}")
        return Lexer(start, self)

    def _is_broken(self, lexer: Lexer) -> bool:
        state: LLMatcher = lexer.start.deep_copy()
        self._tokens.read_mask(state)
        return state.is_error()
