"""What each token of a vocabulary adds to a text, read from the tokenizer's own decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tokenizers

from quire.types.errors import ModelLoadError

REPLACEMENT = "\ufffd"

Piece = TypeVar("Piece")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Rules:
    """How token strings are joined into text; each field is one habit a decoder may have."""

    byte_level: bool = False  # strings spell bytes in GPT-2's alphabet
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # tokens like <0xE2> are single bytes
    joiner: str = ""  # between any two tokens
    strip: str = ""  # a character removed from the start of the whole text ...
    num_stripped: int = 0  # ... at most this often
    first_drops: str = ""  # a character removed from the first token wherever it stands in it


class Pieces(dict[int, Piece]):
    """Token id to piece, made on first use."""

    def __init__(self, make: Callable[[int], Piece]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._make(int(token_id))
        return piece


class Decoding:
    """The rules of one tokenizer's decoder, and its tokens as bytes (byte-level) or strings (all others)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.rules = _read_rules(backend)
        self.as_bytes = Pieces(self._bytes_of)
        self.as_text = Pieces(self._text_of)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._token(token_id) or ""
        spelled = [_BYTES.get(character, -1) for character in token]
        return token.encode() if -1 in spelled else bytes(spelled)

    def _text_of(self, token_id: int) -> str | int | None:
        """The string a token adds, the byte it stands for, or None for an id outside the vocabulary."""
        token = self._token(token_id)
        if token is None:
            return None
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        byte = _fallback_byte(token) if self.rules.byte_fallback else None
        return token if byte is None else byte

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def _fallback_byte(token: str) -> int | None:
    """The byte that a token like <0xE2> stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _read_rules(backend: tokenizers.Tokenizer) -> Rules:
    if backend.decoder is None:
        return Rules(joiner=" ")
    described = json.loads(backend.decoder.__getstate__())
    rules, fused = Rules(), False
    for step in described["decoders"] if described["type"] == "Sequence" else [described]:
        rules, fused = _with_step(rules, step, fused)
    return rules


def _with_step(rules: Rules, step: dict[str, Any], fused: bool) -> tuple[Rules, bool]:
    kind = step["type"]
    if kind == "ByteLevel" and rules == Rules():
        return replace(rules, byte_level=True), True
    if kind == "Replace" and not fused and "String" in step["pattern"]:
        return replace(rules, replacements=(*rules.replacements, (step["pattern"]["String"], step["content"]))), fused
    if kind == "ByteFallback" and not fused:
        return replace(rules, byte_fallback=True), fused
    if kind == "Metaspace" and rules == Rules():
        drops = "" if step.get("prepend_scheme") == "never" else " "
        return replace(rules, replacements=((step["replacement"], " "),), first_drops=drops), fused
    if kind == "Strip" and fused and not rules.byte_level and step["stop"] == 0 and not rules.strip:
        return replace(rules, strip=step["content"], num_stripped=step["start"]), fused
    if kind == "Fuse":
        return rules, True
    raise ModelLoadError(
        "tokenizer.json", f"decoder step {kind!r} is not supported where it stands", fix="use another model"
    )
