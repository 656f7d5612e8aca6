"""`{"name": ..., "parameters": {...}}`, bare or behind `<|python_tag|>`: Llama 3."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_object import CallBook, CallList
from quire.serving.text.tool_calls.marked import MarkedReader

MARK = "<|python_tag|>"


class Llama3Reader(MarkedReader):
    """An answer that begins with an object is calls, several of them between semicolons; behind the mark, anywhere.

    The book knows the tools' names, so that an answer which happens to be JSON stays one.
    """

    mark = MARK

    def __init__(self, book: CallBook) -> None:
        super().__init__(book)
        self._calls: CallList | None = None
        self._before = ""  # what stood before the calls: the mark, or space
        self._in_call = True

    def _begin_call(self) -> None:
        self._before, self._calls = self.mark, CallList(self._book)

    def _read_call(self) -> bool:
        if self._calls is None and not self._begin_bare():
            return not self._in_call
        assert self._calls is not None
        rest = self._feed(self._calls)
        if rest is None:
            return False
        if self._calls.is_call:
            self._buffer, self._calls, self._before = rest, None, ""
        else:
            self._give_up(rest)
        return True

    def _begin_bare(self) -> bool:
        """Whether a call follows here; if that is certain not to be, words do."""
        begun = self._buffer.lstrip(" \t\r\n;" if self._book.has_calls else None)
        if begun[:1] in ("{", "["):
            self._before = self._buffer[: len(self._buffer) - len(begun)]
            self._buffer, self._calls = begun, CallList(self._book)
            return True
        if begun and not self.mark.startswith(begun):
            self._in_call = False
        return False

    def _give_up(self, text: str) -> None:
        self._speech.say(self._before, self._parts)
        self._buffer, self._calls, self._in_call = text, None, False

    def _unread(self) -> str:
        if self._calls is None:
            return self._buffer if not self._book.has_calls else ""
        return self._calls.finish() if self._calls.is_call else self._before + self._calls.finish()
