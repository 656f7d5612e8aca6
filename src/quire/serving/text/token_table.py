"""Makes the vocabulary that the engine needs for grammars: the bytes of every token, read from the tokenizer."""

from __future__ import annotations

from functools import cache

from quire.engine.decoding.vocabulary import Encode, Vocabulary, VocabularySource
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest

_PROBE = "{"  # encoded to detect tokenizers that put a space before a text
_BEFORE = "\x02"  # put before a text that continues another one, so that the space goes before this


def vocabulary_source(tokenizer: Tokenizer) -> VocabularySource:
    """Return a function that makes the vocabulary on its first call and returns the same one afterwards."""
    return cache(lambda: vocabulary_of(tokenizer))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the bytes of all tokens. Raises InvalidRequest for tokenizers that put a separator between tokens."""
    if tokenizer.decoding.rules.joiner:
        raise InvalidRequest(
            "structured_outputs", "are not supported with this model's tokenizer, which puts spaces between tokens"
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
