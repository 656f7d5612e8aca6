"""Temporary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.types.step import Bits, Bools, Ints


@dataclass(frozen=True, slots=True)
class FilledMasks:
    rows: Ints
    bits: Bits
    changed: Bools
    failed: tuple[tuple[int, GrammarError], ...]


class MaskTable:
    def __init__(self, num_rows: int, vocab_size: int, threads: int | None = None) -> None:
        self._bits = np.zeros((num_rows, -(-vocab_size // 32)), dtype=np.uint32)
        self._known: set[int] = set()
        self._begun: tuple[list[int], list[Matcher]] = ([], [])

    def begin(self, rows: Sequence[int], matchers: Sequence[Matcher]) -> None:
        self._begun = list(rows), list(matchers)

    def finish(self) -> FilledMasks:
        rows, changed, failed = [], [], []
        for row, matcher in zip(*self._begun, strict=True):
            try:
                bits = matcher.mask()
            except Exception as error:
                failed.append((row, error))
                continue
            rows.append(row)
            changed.append(row not in self._known or not np.array_equal(bits, self._bits[row]))
            self._bits[row] = bits
            self._known.add(row)
        return FilledMasks(
            np.array(rows, dtype=np.int32), self._bits[rows], np.array(changed, dtype=bool), tuple(failed)
        )

    def forget(self, row: int) -> None:
        self._known.discard(row)

    def close(self) -> None: ...
