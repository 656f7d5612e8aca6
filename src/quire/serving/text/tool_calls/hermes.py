"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and many others."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_object import CallBook, CallList
from quire.serving.text.tool_calls.marked import MarkedReader

START, END = "<tool_call>", "</tool_call>"


class HermesReader(MarkedReader):
    """Reads calls between tags; between one pair there may be a list of them."""

    mark = START

    def __init__(self, book: CallBook) -> None:
        super().__init__(book)
        self._calls: CallList | None = None

    def _begin_call(self) -> None:
        self._calls = CallList(self._book)

    def _read_call(self) -> bool:
        if self._calls is None:
            return self._read_end()
        rest = self._feed(self._calls)
        if rest is None:
            return False
        if self._calls.is_call:
            self._buffer, self._calls = rest, None
        else:
            self._give_up(rest)
        return True

    def _read_end(self) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(END):
            self._buffer, self._in_call = begun[len(END) :], False
            return True
        if END.startswith(begun):
            return False
        self._in_call = False  # a model that forgot the end tag: what follows is words
        return True

    def _unread(self) -> str:
        if self._calls is None:
            return ""  # a part of the end tag
        return self._calls.finish() if self._calls.is_call else self.mark + self._calls.finish()
