"""Finds the tokens of a vocabulary that contain a text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

from quire.serving.text.tokenizer import Tokenizer

_BETWEEN = "\udfff"  # a lone surrogate, which no text contains


class TokenSearch:
    """Searches the text of all tokens at once. The first search reads the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids_with = lru_cache(maxsize=16)(self._ids_with)

    @cached_property
    def _tokens(self) -> tuple[str, Sequence[int]]:
        """The text of all tokens, and where each of them begins."""
        texts = [self._tokenizer.token_text(token) + _BETWEEN for token in range(self._tokenizer.vocab_size)]
        return "".join(texts), list(accumulate(map(len, texts), initial=0))

    def _ids_with(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the tokens that contain one of `texts`, in ascending order."""
        whole, starts = self._tokens
        found: set[int] = set()
        for text in texts:
            place = whole.find(text)
            while place >= 0:
                token = bisect_right(starts, place) - 1
                found.add(token)
                place = whole.find(text, starts[token + 1])
        return tuple(sorted(found))
