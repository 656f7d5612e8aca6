"""A vocabulary whose first 256 tokens are the bytes, for tests of what is allowed to follow what."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import TokenRules
from quire.types.step import Bits

WORDS = (b"hello", b" world", b'{"', b'":', b'"}', b"true", b"false", b"null", b"ab", b"abc")
EOS = 256 + len(WORDS)  # <eos>
STOP = EOS + 1  # <stop>, special too
SIZE = STOP + 1
RULES = TokenRules(end_ids=(EOS,), eos_ids=(EOS,))


def encode(text: str) -> list[int]:
    """The longest token first: what this vocabulary calls canonical."""
    data, ids = text.encode(), []
    while data:
        word = max((word for word in WORDS if data.startswith(word)), key=len, default=data[:1])
        ids.append(256 + WORDS.index(word) if word in WORDS else word[0])
        data = data[len(word) :]
    return ids


def byte_vocabulary() -> Vocabulary:
    tokens = [*(bytes([byte]) for byte in range(256)), *WORDS, b"<eos>", b"<stop>"]
    return Vocabulary(tokens, frozenset({EOS, STOP}), (EOS,), encode)


def decode(token_ids: Iterable[int]) -> str:
    tokens = byte_vocabulary().tokens
    return b"".join(tokens[token] for token in token_ids).decode()


def allowed(bits: Bits, size: int = SIZE) -> set[int]:
    """The tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]).tolist())
