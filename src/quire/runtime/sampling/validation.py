"""Checks a row's token ids against the vocabulary, which only the runtime knows."""

from __future__ import annotations

from quire.types.errors import InvalidRequest
from quire.types.sampling import check_vocabulary
from quire.types.step import NewRow


def check_ids(new: NewRow, vocab_size: int) -> None:
    """Raise InvalidRequest if the row names a token outside the vocabulary."""
    sampling = new.sampling
    check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    check_vocabulary("logit_bias", sampling.logit_bias or (), vocab_size)
    check_vocabulary("logprob_token_ids", sampling.logprob_token_ids or (), vocab_size)
    check_vocabulary("stop_token_ids", sampling.stop_token_ids or (), vocab_size)
    for word in new.rules.bad_words:
        if not word:
            raise InvalidRequest("bad_words", "holds a word without tokens", "leave it out")
        check_vocabulary("bad_words", word, vocab_size)
