"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""

from __future__ import annotations

import re

from quire.serving.text.tool_calls.call_object import CallBook, CallList
from quire.serving.text.tool_calls.json_span import JsonSpan
from quire.serving.text.tool_calls.marked import MarkedReader

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"\s{0,32}([A-Za-z0-9_.\-]{1,256})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s{0,32}(?=\{)")
_NAME_CHARACTERS = 512


class MistralReader(MarkedReader):
    """Behind each mark either a list of calls, or one name with its arguments."""

    mark = MARK

    def __init__(self, book: CallBook) -> None:
        super().__init__(book)
        self._calls: CallList | None = None
        self._arguments: JsonSpan | None = None

    def _begin_call(self) -> None:
        self._calls = self._arguments = None

    def _read_call(self) -> bool:
        if self._calls is not None:
            return self._read_list(self._calls)
        if self._arguments is not None:
            return self._read_arguments(self._arguments)
        begun = self._buffer.lstrip()
        if begun[:1] == "[":
            self._calls = CallList(self._book)
            return True
        return self._read_name()

    def _read_list(self, calls: CallList) -> bool:
        rest = self._feed(calls)
        if rest is None:
            return False
        if calls.is_call:
            self._buffer, self._in_call = rest, False
        else:
            self._give_up(rest)
        return True

    def _read_name(self) -> bool:
        found = _NAME.match(self._buffer)
        if found is None:
            if "{" not in self._buffer and len(self._buffer) < _NAME_CHARACTERS:
                return False
            self._give_up(self._buffer)
            return True
        self._speech.end_at_call()
        self._book.begin(found.group(1), self._parts)
        self._buffer, self._arguments = self._buffer[found.end() :], JsonSpan()
        return True

    def _read_arguments(self, arguments: JsonSpan) -> bool:
        used = arguments.feed(self._buffer)
        self._book.add_arguments(self._buffer[:used], self._parts)
        self._buffer = self._buffer[used:]
        if arguments.is_open:
            return False
        self._in_call = False
        return True

    def _unread(self) -> str:
        if self._calls is not None:
            return self._calls.finish() if self._calls.is_call else self.mark + self._calls.finish()
        return "" if self._arguments is not None else self.mark + self._buffer
