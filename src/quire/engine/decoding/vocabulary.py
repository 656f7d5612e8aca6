"""The model's tokens as text, for those parts of decoding that read what they choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token adds to a text. Made by the text floor, as the engine has no tokenizer."""

    tokens: Sequence[bytes]  # by id; empty where an id has no text
    special_ids: frozenset[int]  # their bytes are a name, never text of an answer
    eos_ids: tuple[int, ...]
    encode: Encode  # the tokens of a text that goes on from another one


VocabularySource = Callable[[], Vocabulary]
