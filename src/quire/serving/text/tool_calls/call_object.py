"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`, alone or in a list, read while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from quire.serving.text.parts import CallArguments, CallBegun, Part
from quire.serving.text.tool_calls.json_span import JsonSpan

_SPACE = r"\s{0,32}"
_HEAD = re.compile(
    rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([^"\\]{{1,256}})"{_SPACE},{_SPACE}'
    rf'"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)


class CallBook:
    """Numbers an answer's calls. Beyond `limit` they are left out; with `known`, other names are no calls."""

    def __init__(
        self, make_id: Callable[[], str], *, limit: int | None = None, known: Collection[str] | None = None
    ) -> None:
        self._make_id, self._limit, self._known = make_id, limit, known
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def knows(self, name: str) -> bool:
        return self._known is None or name in self._known

    def begin(self, name: str, parts: list[Part]) -> None:
        if self._limit is None or self._num_calls < self._limit:
            parts.append(CallBegun(self._num_calls, self._make_id(), name))
        self._num_calls += 1

    def add_arguments(self, text: str, parts: list[Part]) -> None:
        """The next piece of the latest call's arguments."""
        if text and (self._limit is None or self._num_calls <= self._limit):
            parts.append(CallArguments(self._num_calls - 1, text))


class CallObject:
    """One call. Its arguments are passed on as they come if the name stands before them, else when it is whole."""

    def __init__(self, book: CallBook) -> None:
        self._book = book
        self._text = ""  # of it, until it is known to be a call
        self._whole = JsonSpan()
        self._arguments: JsonSpan | None = None
        self.is_call = False

    def push(self, text: str, parts: list[Part]) -> str | None:
        """The text after it, or None while it goes on. Of one that is no call, all text is handed back."""
        used = self._whole.feed(text)
        inside, rest = text[:used], text[used:]
        if self._arguments is not None:
            self._pass_on(self._arguments, inside, parts)
        else:
            self._text += inside
            self._look_for_head(parts)
        if self._whole.is_open:
            return None
        if self.is_call or (self._whole.is_closed and self._read_whole(parts)):
            return rest
        return self._text + rest

    def finish(self) -> str:
        """The text ended inside it: what of it was no call."""
        return "" if self.is_call else self._text

    def _look_for_head(self, parts: list[Part]) -> None:
        head = _HEAD.match(self._text)
        if head is None or not self._book.knows(head.group(1)):
            return
        self.is_call, self._arguments = True, JsonSpan()
        self._book.begin(head.group(1), parts)
        self._pass_on(self._arguments, self._text[head.end() :], parts)

    def _pass_on(self, span: JsonSpan, text: str, parts: list[Part]) -> None:
        if span.is_open:
            self._book.add_arguments(text[: span.feed(text)], parts)

    def _read_whole(self, parts: list[Part]) -> bool:
        """Take the call out of the complete object, if it is one."""
        try:
            found: Any = json.loads(self._text)
        except (ValueError, RecursionError):
            return False
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or not name or not self._book.knows(name):
            return False
        arguments = found.get("arguments", found.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = _object_in(arguments)
        if not isinstance(arguments, dict):
            return False
        self._book.begin(name, parts)
        self._book.add_arguments(json.dumps(arguments, ensure_ascii=False), parts)
        self.is_call = True
        return True


class CallList:
    """One call, or a list of them."""

    def __init__(self, book: CallBook) -> None:
        self._book = book
        self._before = ""  # what goes back with a first object that is no call
        self._in_list = False
        self._object: CallObject | None = None
        self._buffer = ""
        self.is_call = False

    def push(self, text: str, parts: list[Part]) -> str | None:
        """The text after the calls, or None while they go on. What is no call is handed back."""
        self._buffer += text
        while self._object is not None or self._begin():
            if self._object is None:
                rest, self._buffer = self._buffer, ""
                return rest
            rest_or_none = self._object.push(self._buffer, parts)
            self._buffer = ""
            self.is_call = self.is_call or self._object.is_call
            if rest_or_none is None:
                return None
            if not self._object.is_call:
                return self._before + rest_or_none
            self._object, self._before = None, ""
            if not self._in_list:
                return rest_or_none
            self._buffer = rest_or_none
        return None

    def finish(self) -> str:
        return self._before + (self._object.finish() if self._object is not None else self._buffer)

    def _begin(self) -> bool:
        """Go to the next call or to the end; False: more text is needed to know which."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if not self.is_call and not self._in_list and begun[0] == "[":
            self._in_list = True
            self._before, self._buffer = self._buffer[: -len(begun) + 1 or None], begun[1:]
            return self._begin()
        if self.is_call and begun[0] == "]":
            self._buffer = begun[1:]
            return True
        if self.is_call and begun[0] == ",":
            self._before, self._buffer = ",", begun[1:]
        elif self.is_call:
            return True  # neither: what follows is no call
        self._object = CallObject(self._book)
        return True


def _object_in(text: str) -> Any:
    """Arguments that a model wrote as text of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
