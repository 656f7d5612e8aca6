"""Incremental reader of calls written as JSON objects: `{"name": ..., "arguments": {...}}`, single or in a list."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.serving.text.parts import Part
from quire.serving.text.tool_calls.call_book import CallBook
from quire.serving.text.tool_calls.json_span import JsonSpan

_SPACE = r"\s{0,32}"


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The names of the members that hold a call's name and its arguments, and of one that may precede the name."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    before: str = ""


KEYS = CallKeys()


@lru_cache(maxsize=16)
def _head(keys: CallKeys) -> re.Pattern[str]:
    """Return the pattern of the beginning of an object, up to its arguments, if the name comes first."""
    either = "|".join(map(re.escape, keys.arguments))
    before = (
        rf'(?:"{re.escape(keys.before)}"{_SPACE}:{_SPACE}"[^"\\]{{0,64}}"{_SPACE},{_SPACE})?' if keys.before else ""
    )
    return re.compile(
        rf'{_SPACE}\{{{_SPACE}{before}"{re.escape(keys.name)}"{_SPACE}:{_SPACE}"([^"\\]{{1,256}})"{_SPACE},{_SPACE}'
        rf'"(?:{either})"{_SPACE}:{_SPACE}(?=\{{)'
    )


@lru_cache(maxsize=16)
def _half_head(keys: CallKeys) -> re.Pattern[str]:
    """Return a pattern that matches every prefix of an object whose first member is the name. Groups: the name, and the
    text after it."""
    pattern = _half(f'{{"{keys.name}":"', r'(?:([^"\\]*)("?.*))?')
    if keys.before:  # an object may also end within the member before the name
        id_first = _half(f'{{"{keys.before}":"', r'(?:[^"\\]{0,64}(?:".*)?)?')
        pattern = f"(?:{pattern}|{id_first})"
    return re.compile(pattern, re.DOTALL)


def _half(text: str, pattern: str) -> str:
    """Return a pattern that matches every prefix of `text`, and `pattern` behind the whole of it."""
    for character in reversed(text):
        space = _SPACE if character in '{":' else ""
        pattern = rf"(?:{re.escape(character)}{space}{pattern})?"
    return pattern


class CallObject:
    """One call. If the name comes before the arguments, arguments are passed on while they arrive; otherwise when the
    object is complete."""

    def __init__(self, book: CallBook, keys: CallKeys = KEYS) -> None:
        self._book, self._keys = book, keys
        self._text = ""  # the object's text until it is known to be a call
        self._whole = JsonSpan()
        self._arguments: JsonSpan | None = None
        self.is_call = False

    def push(self, text: str, parts: list[Part]) -> str | None:
        """Add text. Returns the text after the object, or None while it is incomplete. If it is not a call, all of its
        text is returned too."""
        used = self._whole.feed(text)
        inside, rest = text[:used], text[used:]
        if self._arguments is not None:
            self._pass_on(self._arguments, inside, parts)
        else:
            self._text += inside
            self._look_for_head(parts)
        if self._whole.is_open:
            return None
        if self._arguments is not None:
            self._book.end(parts)
        if self.is_call or (self._whole.is_closed and self._read_whole(parts)):
            return rest
        return self._text + rest

    def unread(self) -> str:
        """Return the text of the object that was not passed on as a call."""
        return "" if self.is_call else self._text

    def _look_for_head(self, parts: list[Part]) -> None:
        head = _head(self._keys).match(self._text)
        if head is None or not self._book.knows(head.group(1)):
            return
        self.is_call, self._arguments = True, JsonSpan()
        self._book.begin(head.group(1), parts)
        self._pass_on(self._arguments, self._text[head.end() :], parts)

    def _pass_on(self, span: JsonSpan, text: str, parts: list[Part]) -> None:
        if span.is_open:
            self._book.add_arguments(text[: span.feed(text)], parts)

    def _read_whole(self, parts: list[Part]) -> bool:
        """Read the call from the complete object. Returns whether it is a call."""
        try:
            found: Any = json.loads(self._text)
        except (ValueError, RecursionError):
            return False
        name = found.get(self._keys.name) if isinstance(found, dict) else None
        if not isinstance(name, str) or not name or not self._book.knows(name):
            return False
        arguments: Any = next((found[key] for key in self._keys.arguments if found.get(key) is not None), {})
        if isinstance(arguments, str):
            arguments = _object_in(arguments)
        if not isinstance(arguments, dict):
            return False
        self._book.begin(name, parts)
        self._book.add_arguments(json.dumps(arguments, ensure_ascii=False), parts)
        self._book.end(parts)
        self.is_call = True
        return True


class CallList:
    """One call, or a list of calls."""

    def __init__(self, book: CallBook, keys: CallKeys = KEYS) -> None:
        self._book, self._keys = book, keys
        self._before = ""  # text to return together with an object that is not a call
        self._in_list = False
        self._object: CallObject | None = None
        self._buffer = ""
        self.is_call = False

    def push(self, text: str, parts: list[Part]) -> str | None:
        """Add text. Returns the text after the calls, or None while they are incomplete. Text that is not a call is
        returned too."""
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

    def may_be_call(self) -> bool:
        """Return whether the text, which ended before it was complete, is or may be the beginning of a call."""
        if self.is_call:
            return True
        unread = self.unread().lstrip()
        found = _half_head(self._keys).fullmatch(unread.removeprefix("[").lstrip())
        if found is None or found.group(1) is None:
            return found is not None
        name, rest = found.groups()
        known = self._book.known
        return known is None or (name in known if rest else any(one.startswith(name) for one in known))

    def unread(self) -> str:
        """Return the text that was not passed on as calls."""
        return self._before + (self._object.unread() if self._object is not None else self._buffer)

    def _begin(self) -> bool:
        """Advance to the next call or to the end. Returns False if more text is needed to decide which."""
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
            return True  # neither: the following text is not a call
        self._object = CallObject(self._book, self._keys)
        return True


def _object_in(text: str) -> Any:
    """Parse arguments that a model wrote as JSON inside a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
