"""Decodes token ids to text while they arrive. No token is decoded twice."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from typing import Protocol

from quire.serving.text.tokenizer import REPLACEMENT, Decoding, Tokenizer


class _Stream(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Decodes one sequence. All text that `push` and `finish` return, concatenated, equals `tokenizer.decode` of all
    ids.

    A character is held back until its last byte has arrived, so no piece ends in an incomplete character. `continues`
    means that the ids follow other text: the leading space that some tokenizers drop at the start of a text is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        *,
        continues: bool = False,
    ) -> None:
        special = tokenizer.special_ids
        skipped = special if skip_special_tokens else frozenset[int]()
        self._stream: _Stream
        if tokenizer.decoding.rules.byte_level:
            self._stream = _ByteStream(tokenizer.decoding, skipped)
        else:
            unspaced = frozenset[int]() if spaces_between_special_tokens else special
            self._stream = _PieceStream(tokenizer.decoding, skipped, unspaced, at_start=not continues)

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that is complete after `ids`; empty while a character is incomplete."""
        return self._stream.push(ids)

    def finish(self) -> str:
        """Return the text that is still held back, with U+FFFD for invalid bytes. Call once, at the end."""
        return self._stream.finish()


class _ByteStream:
    """For byte-level vocabularies: tokens are bytes, and the text is their UTF-8 decoding."""

    def __init__(self, decoding: Decoding, skipped: Collection[int]) -> None:
        self._pieces, self._skipped = decoding.as_bytes, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        pieces, skipped = self._pieces, self._skipped
        return self._utf8.decode(b"".join([pieces[index] for index in ids if index not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """For vocabularies of strings, with tokens for single bytes as a fallback.

    A run of byte tokens is decoded as a whole when the run ends. If it is not valid UTF-8, every byte becomes U+FFFD.
    """

    def __init__(self, decoding: Decoding, skipped: Collection[int], unspaced: Collection[int], at_start: bool) -> None:
        self._pieces, self._rules = decoding.as_text, decoding.rules
        self._skipped, self._unspaced = skipped, unspaced
        self._run = bytearray()
        self._strips = self._rules.num_stripped if at_start else 0
        self._is_first, self._after_special = at_start, False
        self._joiner = "" if at_start else self._rules.joiner

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for index in ids:
            if index in self._skipped or (piece := self._pieces[index]) is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                parts.append(self._end_run())
            parts.append(self._joined(piece, index in self._unspaced))
        return self._stripped("".join(parts))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _joined(self, piece: str, is_unspaced: bool) -> str:
        if self._is_first and self._rules.first_drops:
            piece = piece.replace(self._rules.first_drops, "")
        joiner = "" if is_unspaced and self._after_special else self._joiner
        self._is_first, self._after_special, self._joiner = False, is_unspaced, self._rules.joiner
        return joiner + piece

    def _stripped(self, text: str) -> str:
        """Strip leading characters from the text, as many as are still to be stripped at the start of the output."""
        while self._strips and text:
            shorter = text.removeprefix(self._rules.strip)
            self._strips = self._strips - 1 if shorter != text else 0
            text = shorter
        return text
