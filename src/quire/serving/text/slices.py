"""Cuts a long text into slices. Tokenized one by one, they give the same tokens as the whole text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import tokenizers

SLICE_CHARACTERS = 65_536
_MARKS = {"Ġ": " ", "Ċ": "\n"}  # how byte-level vocabularies write space and newline
_BLANKS = frozenset("ĠĊĉč")  # how they write space, newline, tab and carriage return
_SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation")


def slices_of(text: str, size: int = SLICE_CHARACTERS) -> Iterator[str]:
    """Yield the slices of `text`, each of at least `size` characters except the last.

    Cuts are before a single space or newline between two letters. A text without any is one slice.
    """
    start = 0
    while len(text) - start > size:
        cut = _next_cut(text, start + size)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _next_cut(text: str, place: int) -> int | None:
    while True:
        found = [at for mark in _MARKS.values() if (at := text.find(mark, place, -1)) >= 0]
        if not found:
            return None
        place = min(found)
        if text[place - 1].isalpha() and text[place + 1].isalpha():
            return place
        place += 1


def can_slice(backend: tokenizers.Tokenizer) -> bool:
    """Whether the cuts of `slices_of` never change the tokens of a text.

    This holds if no token can span a cut (none has a letter followed by a space or newline), words are split by a known
    pre-tokenizer, and nothing is added, dropped or normalized at the ends of a text.
    """
    normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())["type"]
    if normalizer not in (None, "NFC") or not _splits_words(backend):
        return False
    for token in backend.get_added_tokens_decoder().values():
        swallows = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
        if swallows or token.single_word or _crosses_words(token.content, set(_MARKS.values())):
            return False
    return not any(_crosses_words(token, set(_MARKS)) for token in backend.get_vocab(with_added_tokens=False))


def _splits_words(backend: tokenizers.Tokenizer) -> bool:
    if backend.pre_tokenizer is None:
        return False
    described = json.loads(backend.pre_tokenizer.__getstate__())
    steps = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    is_known = all(step["type"] in _SPLITTERS and not step.get("add_prefix_space", False) for step in steps)
    return is_known and any(step["type"] == "ByteLevel" for step in steps)


def _crosses_words(token: str, marks: set[str]) -> bool:
    """Whether a token has a space or newline after a letter, or after a byte of a non-ASCII character."""
    return any(
        after in marks and (before.isalpha() or not before.isascii()) and before not in _BLANKS
        for before, after in pairwise(token)
    )
