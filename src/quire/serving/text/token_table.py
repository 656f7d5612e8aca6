"""The vocabulary that the engine is given: every token's bytes, read from the tokenizer."""

from __future__ import annotations

from functools import cache

from quire.engine.decoding.vocabulary import Encode, Vocabulary, VocabularySource
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest

_PROBE = "{"  # a text that tokenizers with a habit of putting a space before the first word put one before
_BEFORE = "\x02"  # stands before a text that goes on from another, and takes that space


def vocabulary_source(tokenizer: Tokenizer) -> VocabularySource:
    """Makes the vocabulary when it is first asked for; all who ask share one."""
    return cache(lambda: vocabulary_of(tokenizer))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """All tokens as bytes. Raises InvalidRequest for tokenizers that put something between any two tokens."""
    if tokenizer.decoding.rules.joiner:
        raise InvalidRequest(
            "structured_outputs", "cannot be followed with this model's tokenizer, which joins tokens by spaces"
        )
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, tokenizer.special_ids.union(tokenizer.eos_ids), tokenizer.eos_ids, _encoder(tokenizer))


def _encoder(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    if b"".join(map(tokenizer.token_bytes, encode(_PROBE))) == _PROBE.encode():
        return encode
    before = encode(_BEFORE)

    def encode_on(text: str) -> list[int]:
        ids = encode(_BEFORE + text)
        return ids[len(before) :] if ids[: len(before)] == before else []

    return encode_on
