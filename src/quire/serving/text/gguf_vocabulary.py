"""Reads and checks the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from quire.runtime.loading.gguf.cursor import Texts
from quire.types.errors import ModelLoadError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens with their types, and typed access to the other `tokenizer.ggml.*` keys. Errors name the key."""

    file: str
    metadata: Mapping[str, object]
    tokens: list[str]
    types: list[int]

    def error(self, key: str, reason: str, fix: str = "") -> ModelLoadError:
        return ModelLoadError(self.file, f"{_PREFIX}{key} {reason}", fix=fix)

    def text(self, key: str) -> str | None:
        value = self.metadata.get(_PREFIX + key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, f"must be a string, got {value!r:.80}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_PREFIX + key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, f"must be true or false, got {value!r:.80}")

    def token_id(self, key: str) -> int | None:
        """Return the token id stored under `key`. Returns None if the key is absent or all bits are set, which means
        none in GGUF."""
        value = self.metadata.get(_PREFIX + key)
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(key, f"must be an id below {len(self.tokens)}, got {value!r:.80}")
        return value

    def texts(self, key: str) -> list[str]:
        return _texts(self.file, self.metadata, key)

    def numbers(self, key: str) -> list[float]:
        values = self.metadata.get(_PREFIX + key)
        if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
            raise self.error(key, "must be an array of numbers", "the file is damaged or incomplete; fetch it again")
        if len(values) != len(self.tokens):
            raise self.error(key, f"has {len(values)} entries for {len(self.tokens)} tokens", "fetch the file again")
        return values

    @property
    def has_bytes(self) -> bool:
        """Whether the vocabulary has a token for every byte."""
        return {f"<0x{byte:02X}>" for byte in range(256)} <= set(self.tokens)

    def of_types(self, *kinds: TokenType) -> list[int]:
        return [index for index, stored in enumerate(self.types) if stored in kinds]


def read_vocabulary(metadata: Mapping[str, object], file: str) -> GgufVocabulary:
    """Return the vocabulary in `metadata`. Raises ModelLoadError if tokens are missing or duplicated, or their number
    differs from that of the types."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(_texts(file, metadata, "tokens"))]
    if len(set(tokens)) != len(tokens):
        doubled = next(token for token in tokens if tokens.count(token) > 1)
        raise ModelLoadError(
            file, f"{_PREFIX}tokens holds {doubled!r:.80} more than once", fix="convert the model again"
        )
    types = metadata.get(_PREFIX + "token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    if not isinstance(types, list) or not set(map(type, types)) <= {int}:
        raise ModelLoadError(file, f"{_PREFIX}token_type must be an array of whole numbers")
    if len(types) != len(tokens):
        raise ModelLoadError(file, f"{_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    return GgufVocabulary(file, metadata, tokens, types)


def _texts(file: str, metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list | Texts) or not set(map(type, values)) <= {str}:
        raise ModelLoadError(
            file, f"{_PREFIX}{key} is missing or not an array of strings", fix="use a file converted with its tokenizer"
        )
    return list(values)
