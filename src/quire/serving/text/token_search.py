"""Finds the tokens of a vocabulary that contain a text."""

from __future__ import annotations

import re
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
        if not texts:
            return ()
        whole, starts = self._tokens
        one = re.compile(f"(?:{'|'.join(map(re.escape, texts))})[^{_BETWEEN}]*")  # to the end of the token: one match
        return tuple(bisect_right(starts, match.start()) - 1 for match in one.finditer(whole))
