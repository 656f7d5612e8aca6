"""Vocabulary: the model's tokens as bytes, for grammars and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token. The serving layer makes it, because the engine has no tokenizer."""

    tokens: Sequence[bytes]  # by id; empty where an id has no text
    special_ids: frozenset[int]  # tokens whose bytes are only their names and never part of an answer
    eos_ids: tuple[int, ...]
    encode: Encode  # tokenizes a text that continues another one


VocabularySource = Callable[[], Vocabulary]
