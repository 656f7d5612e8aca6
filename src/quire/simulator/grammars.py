"""A grammar compiler and matchers that return recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.engine.decoding.grammar import Compilation, GrammarError, Matcher
from quire.engine.recording.encoder import path_digest
from quire.simulator.model_outputs import GrammarResults
from quire.types.sampling import TokenRules
from quire.types.step import Bits


class ReplayedGrammars:
    """A grammar compiler for replays. The text of a grammar is the ordinal of its request, and `is_ready` returns
    whether that request's grammar is compiled."""

    def __init__(
        self,
        results: Mapping[int, GrammarResults],
        vocab_size: int,
        is_ready: Callable[[int], bool],
        wait: Callable[[float], None],
    ) -> None:
        self._results, self._is_ready, self.wait, self.vocab_size = results, is_ready, wait, vocab_size
        self._all_allowed: Bits = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)

    def compile(self, text: str) -> Compilation:
        results = self._results.get(int(text), GrammarResults())
        return _ReplayedCompilation(int(text), results, self._all_allowed, self._is_ready)

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ReplayedCompilation:
    ordinal: int
    results: GrammarResults
    all_allowed: Bits
    ready: Callable[[int], bool]

    @property
    def is_ready(self) -> bool:
        return self.ready(self.ordinal)

    def matcher(self, rules: TokenRules) -> Matcher:  # noqa: ARG002 - Compilation's signature
        matcher = _ReplayedMatcher(self.results, self.all_allowed, [])
        matcher.mask()
        return matcher


class _ReplayedMatcher:
    """Allows every token except those that the recorded grammar refused, because the recorded tokens were sampled under
    the real grammar."""

    def __init__(self, results: GrammarResults, all_allowed: Bits, path: list[int]) -> None:
        self._results, self._all_allowed, self._path = results, all_allowed, path

    def mask(self) -> Bits:
        if self._results.faults and (fault := self._results.faults.get(path_digest(self._path))):
            raise GrammarError(fault)
        return self._all_allowed

    def advance(self, token: int) -> bool:
        self.mask()
        if self._results.refused and (path_digest(self._path), token) in self._results.refused:
            return False
        self._path.append(token)
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        return self._results.forced.get(path_digest(self._path), ())[:limit] if self._results.forced else ()

    @property
    def is_over(self) -> bool:
        return bool(self._results.over) and path_digest(self._path) in self._results.over

    def clone(self) -> Matcher:
        return _ReplayedMatcher(self._results, self._all_allowed, self._path.copy())

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._path[-num_tokens:]
