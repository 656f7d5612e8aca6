"""What of a row only the runtime can check: ids against the vocabulary it samples from."""

from __future__ import annotations

from collections.abc import Iterable

from quire.types.errors import InvalidRequest
from quire.types.step import NewRow


def check_ids(new: NewRow, vocab_size: int) -> None:
    """Raise InvalidRequest if the row names a token that the model does not have."""
    sampling = new.sampling
    _check("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check("logit_bias", sampling.logit_bias or (), vocab_size)
    _check("stop_token_ids", sampling.stop_token_ids or (), vocab_size)
    for word in new.rules.bad_words:
        if not word:
            raise InvalidRequest("bad_words", "holds a word without tokens", "leave it out")
        _check("bad_words", word, vocab_size)


def _check(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                field, f"names token {token}, outside the vocabulary", f"use ids from 0 to {vocab_size - 1}"
            )
