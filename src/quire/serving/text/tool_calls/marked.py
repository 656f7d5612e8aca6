"""Calls that stand behind a mark in the text: what all such formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.serving.text.parts import Part, Said, held_back
from quire.serving.text.tool_calls.call_object import CallBook, CallList


class Speech:
    """Words around calls. White space is held until a word follows it: next to a call it is dropped."""

    def __init__(self, book: CallBook) -> None:
        self._book = book
        self._space = ""

    def say(self, text: str, parts: list[Part]) -> None:
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words:
            parts.append(Said(words))

    def end_at_call(self) -> None:
        self._space = ""

    def finish(self, parts: list[Part]) -> None:
        if self._space and not self._book.has_calls:
            parts.append(Said(self._space))
        self._space = ""


class MarkedReader(ABC):
    """Words until `mark`, then whatever `_read_call` makes of what follows, and again.

    `_read_call` works on `_buffer` and adds to `_parts`. It returns False while it needs more text; it sets `_in_call`
    to False when the call is over. `_unread` is text of a call that never became one.
    """

    mark = ""

    def __init__(self, book: CallBook) -> None:
        self._book, self._speech = book, Speech(book)
        self._buffer = ""
        self._parts: list[Part] = []
        self._in_call = False

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._read_call() if self._in_call else self._read_words():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        if self._in_call:
            self._speech.say(self._unread(), self._parts)
        elif self._buffer:
            self._speech.say(self._buffer, self._parts)
        self._buffer = ""
        self._speech.finish(self._parts)
        return self._taken()

    def _read_words(self) -> bool:
        """Pass on what is certainly no mark; True when a call begins."""
        place = self._buffer.find(self.mark)
        if place < 0:
            certain = len(self._buffer) - held_back(self._buffer, self.mark)
            self._speech.say(self._buffer[:certain], self._parts)
            self._buffer = self._buffer[certain:]
            return False
        self._speech.say(self._buffer[:place], self._parts)
        self._buffer, self._in_call = self._buffer[place + len(self.mark) :], True
        self._begin_call()
        return True

    def _feed(self, calls: CallList) -> str | None:
        """Give a list of calls what was read so far; what follows it, or None while it goes on."""
        text, self._buffer = self._buffer, ""
        rest = calls.push(text, self._parts)
        if calls.is_call:
            self._speech.end_at_call()
        return rest

    @abstractmethod
    def _begin_call(self) -> None:
        """The mark was read."""

    @abstractmethod
    def _read_call(self) -> bool: ...

    @abstractmethod
    def _unread(self) -> str: ...

    def _give_up(self, text: str) -> None:
        """What followed the mark is no call: all of it is words."""
        self._speech.say(self.mark, self._parts)
        self._buffer, self._in_call = text, False

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
