"""Grammars whose answers are noted: a replay has no vocabulary to ask one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.engine.decoding.grammar import Compilation, GrammarError, Grammars, Matcher
from quire.engine.recording.items import GrammarNote
from quire.types.sampling import TokenRules
from quire.types.step import Bits

Note = Callable[[GrammarNote], None]


class NotedGrammars:
    """Compiles as another does. `ordinal` is the request that is being submitted."""

    def __init__(self, inner: Grammars, note: Note) -> None:
        self._inner, self._note, self.vocab_size = inner, note, inner.vocab_size
        self.ordinal = 0

    def compile(self, text: str) -> Compilation:
        return _NotedCompilation(self._inner.compile(text), self.ordinal, self._note)

    def wait(self, seconds: float) -> None:
        self._inner.wait(seconds)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class _NotedCompilation:
    inner: Compilation
    ordinal: int
    note: Note

    @property
    def is_ready(self) -> bool:
        return self.inner.is_ready

    def matcher(self, rules: TokenRules) -> Matcher:
        with _noting(self.note, self.ordinal, []):
            return _NotedMatcher(self.inner.matcher(rules), self.ordinal, self.note, [])


class _NotedMatcher:
    """A matcher that knows what it has taken in."""

    def __init__(self, inner: Matcher, ordinal: int, note: Note, path: list[int]) -> None:
        self._inner, self._ordinal, self._note, self._path = inner, ordinal, note, path

    def mask(self) -> Bits:
        with _noting(self._note, self._ordinal, self._path):
            return self._inner.mask()

    def advance(self, token: int) -> bool:
        with _noting(self._note, self._ordinal, self._path):
            is_allowed = self._inner.advance(token)
        if is_allowed:
            self._path.append(token)
        else:
            self._note(GrammarNote(self._ordinal, tuple(self._path), refused=token))
        return is_allowed

    def forced(self, limit: int) -> tuple[int, ...]:
        tokens = self._inner.forced(limit)
        if tokens:
            self._note(GrammarNote(self._ordinal, tuple(self._path), forced=tokens))
        return tokens

    @property
    def is_over(self) -> bool:
        is_over = self._inner.is_over
        if is_over:
            self._note(GrammarNote(self._ordinal, tuple(self._path), is_over=True))
        return is_over

    def clone(self) -> Matcher:
        return _NotedMatcher(self._inner.clone(), self._ordinal, self._note, self._path.copy())

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._path[-num_tokens:]


@contextmanager
def _noting(note: Note, ordinal: int, path: list[int]) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        note(GrammarNote(ordinal, tuple(path), fault=str(error)))
        raise
