"""Token ids to text while they arrive, without ever decoding a token twice."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from typing import Protocol

from quire.serving.text.tokenizer import REPLACEMENT, Decoding, Tokenizer


class _Stream(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """One sequence's text. What `push` and `finish` return, joined, is `tokenizer.decode` of all ids pushed.

    A character is held back until its last byte is there, so no piece ends in a broken one. With `continues` the ids
    follow other text, and the leading space some tokenizers drop at a text's start is kept.
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
        """The text that became certain with `ids`; empty while a character is incomplete."""
        return self._stream.push(ids)

    def finish(self) -> str:
        """What was still held back, as far as it can be read. Call once, at the end."""
        return self._stream.finish()


class _ByteStream:
    """Byte-level vocabularies: tokens are bytes, the text is their UTF-8."""

    def __init__(self, decoding: Decoding, skipped: Collection[int]) -> None:
        self._pieces, self._skipped = decoding.as_bytes, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        pieces, skipped = self._pieces, self._skipped
        return self._utf8.decode(b"".join([pieces[index] for index in ids if index not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """Vocabularies of strings, with single bytes for what they cannot spell.

    A run of byte tokens is read as a whole when the run ends: all of it is UTF-8, or every byte becomes U+FFFD.
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
        """Drop what remains to be dropped of the text's leading characters."""
        while self._strips and text:
            shorter = text.removeprefix(self._rules.strip)
            self._strips = self._strips - 1 if shorter != text else 0
            text = shorter
        return text
