"""Grammars that say what was said before: which samples are over, and what had to follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.engine.decoding.grammar import Compilation, GrammarError, Matcher
from quire.engine.recording.encoder import path_digest
from quire.simulator.answers import Script
from quire.types.sampling import TokenRules
from quire.types.step import Bits


class ScriptedGrammars:
    """A grammar's text is its request's ordinal here. `is_ready` tells whose is compiled by now."""

    def __init__(
        self,
        scripts: Mapping[int, Script],
        vocab_size: int,
        is_ready: Callable[[int], bool],
        wait: Callable[[float], None],
    ) -> None:
        self._scripts, self._is_ready, self.wait, self.vocab_size = scripts, is_ready, wait, vocab_size
        self._anything: Bits = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)

    def compile(self, text: str) -> Compilation:
        script = self._scripts.get(int(text), Script())
        return _ScriptedCompilation(int(text), script, self._anything, self._is_ready)

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ScriptedCompilation:
    ordinal: int
    script: Script
    anything: Bits
    ready: Callable[[int], bool]

    @property
    def is_ready(self) -> bool:
        return self.ready(self.ordinal)

    def matcher(self, rules: TokenRules) -> Matcher:  # noqa: ARG002 - Compilation's signature
        matcher = _ScriptedMatcher(self.script, self.anything, [])
        matcher.mask()
        return matcher


class _ScriptedMatcher:
    """Allows everything but what was refused, as every choice was made already."""

    def __init__(self, script: Script, anything: Bits, path: list[int]) -> None:
        self._script, self._anything, self._path = script, anything, path

    def mask(self) -> Bits:
        if self._script.faults and (fault := self._script.faults.get(path_digest(self._path))):
            raise GrammarError(fault)
        return self._anything

    def advance(self, token: int) -> bool:
        self.mask()
        if self._script.refused and (path_digest(self._path), token) in self._script.refused:
            return False
        self._path.append(token)
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        return self._script.forced.get(path_digest(self._path), ())[:limit] if self._script.forced else ()

    @property
    def is_over(self) -> bool:
        return bool(self._script.over) and path_digest(self._path) in self._script.over

    def clone(self) -> Matcher:
        return _ScriptedMatcher(self._script, self._anything, self._path.copy())

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._path[-num_tokens:]
