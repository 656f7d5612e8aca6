"""A vocabulary of some thousand words over the bytes: large enough that slices and forced texts matter."""

from __future__ import annotations

import random
from functools import cache

from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import TokenRules

_LATIN, _CYRILLIC = "abcdefghijklmnopqrstuvwxyz", "абвгдежзийклмнопрстуфхцчшщыьэюя"
_MARKS = [
    '{"',
    '":',
    '": ',
    '": "',
    '", "',
    '"}',
    '",',
    '", ',
    ' "',
    ' {"',
    "}, ",
    "], [",
    "()",
    "://",
    "00",
    "12",
    " 1",
]


@cache
def _words() -> tuple[bytes, ...]:
    rng, found = random.Random(7), dict.fromkeys(_MARKS)
    while len(found) < 3_000:
        letters = _LATIN if rng.random() < 0.7 else _CYRILLIC
        word = "".join(rng.choices(letters, k=rng.choice((2, 2, 3, 3, 4, 5, 6, 8, 11))))
        word = rng.choice((word, word, f" {word}", f" {word}", word.title(), f"{word}_", f"{word}-", f"{word}, "))
        found[word] = None
    return tuple(word.encode() for word in found)


WORDS = _words()
EOS = 256 + len(WORDS)
SIZE = EOS + 1
RULES = TokenRules(end_ids=(EOS,), eos_ids=(EOS,))
_IDS = {word: 256 + place for place, word in enumerate(WORDS)}
_LONGEST = max(map(len, WORDS))


def encode(text: str) -> list[int]:
    """The longest token first."""
    data, ids, place = text.encode(), [], 0
    while place < len(data):
        for length in range(min(_LONGEST, len(data) - place), 0, -1):
            token = data[place] if length == 1 else _IDS.get(data[place : place + length])
            if token is not None:
                ids.append(token)
                place += length
                break
    return ids


@cache
def word_vocabulary() -> Vocabulary:
    tokens = [*(bytes([byte]) for byte in range(256)), *WORDS, b"<eos>"]
    return Vocabulary(tokens, frozenset({EOS}), (EOS,), encode)
