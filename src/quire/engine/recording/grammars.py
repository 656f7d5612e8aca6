"""Grammars that record the results of their matchers. A replay has no vocabulary, so it cannot compile a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.engine.decoding.grammar import Compilation, GrammarError, Grammars, Matcher
from quire.engine.recording.events import GrammarResult
from quire.types.sampling import TokenRules
from quire.types.step import Bits

Record = Callable[[GrammarResult], None]


class RecordedGrammars:
    """Wraps a grammar compiler and records the results of its matchers. `ordinal` is that of the request being
    submitted."""

    def __init__(self, inner: Grammars, record: Record) -> None:
        self._inner, self._record, self.vocab_size = inner, record, inner.vocab_size
        self.ordinal = 0

    def compile(self, text: str) -> Compilation:
        return _RecordedCompilation(self._inner.compile(text), self.ordinal, self._record)

    def wait(self, seconds: float) -> None:
        self._inner.wait(seconds)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class _RecordedCompilation:
    inner: Compilation
    ordinal: int
    record: Record

    @property
    def is_ready(self) -> bool:
        return self.inner.is_ready

    def matcher(self, rules: TokenRules) -> Matcher:
        with _recording_errors(self.record, self.ordinal, []):
            return _RecordedMatcher(self.inner.matcher(rules), self.ordinal, self.record, [])


class _RecordedMatcher:
    """Wraps a matcher and keeps the tokens it has accepted."""

    def __init__(self, inner: Matcher, ordinal: int, record: Record, path: list[int]) -> None:
        self._inner, self._ordinal, self._record, self._path = inner, ordinal, record, path

    def mask(self) -> Bits:
        with _recording_errors(self._record, self._ordinal, self._path):
            return self._inner.mask()

    def advance(self, token: int) -> bool:
        with _recording_errors(self._record, self._ordinal, self._path):
            is_allowed = self._inner.advance(token)
        if is_allowed:
            self._path.append(token)
        else:
            self._record(GrammarResult(self._ordinal, tuple(self._path), refused=token))
        return is_allowed

    def forced(self, limit: int) -> tuple[int, ...]:
        tokens = self._inner.forced(limit)
        if tokens:
            self._record(GrammarResult(self._ordinal, tuple(self._path), forced=tokens))
        return tokens

    @property
    def is_over(self) -> bool:
        is_over = self._inner.is_over
        if is_over:
            self._record(GrammarResult(self._ordinal, tuple(self._path), is_over=True))
        return is_over

    def clone(self) -> Matcher:
        return _RecordedMatcher(self._inner.clone(), self._ordinal, self._record, self._path.copy())

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._path[-num_tokens:]


@contextmanager
def _recording_errors(record: Record, ordinal: int, path: list[int]) -> Iterator[None]:
    """Record a GrammarError that the body raises."""
    try:
        yield
    except GrammarError as error:
        record(GrammarResult(ordinal, tuple(path), fault=str(error)))
        raise
