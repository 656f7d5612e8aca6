"""Finds the end of a JSON object or list while its text arrives."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'[{}\[\]"]|[^\sA-Za-z0-9_.,:+\-]')  # changes the state, or is never in JSON


class JsonSpan:
    """Tracks brackets and strings, and nothing else of the JSON grammar.

    Closed at the bracket that closes the first one. Broken at a character that JSON never has outside a string.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_closed = self.is_broken = False

    @property
    def is_open(self) -> bool:
        return not self.is_closed and not self.is_broken

    def feed(self, text: str) -> int:
        """Return how many characters of `text` belong to the value: all while it stays open."""
        place = 0
        while place < len(text) and self.is_open:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
            if self._depth == 0 and (found is None or text[place : found.start()].strip()):
                stray = text[place:].lstrip()
                self.is_broken = bool(stray)
                return len(text) - len(stray) if stray else len(text)
            if found is None:
                return len(text)
            place = found.start() + self._take(found.group())
        return place

    def _take(self, character: str) -> int:
        """Update the state for one character. Returns how many characters were consumed."""
        if self._in_string:
            self._is_escaped, self._in_string = character == "\\", character != '"'
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_closed = self._depth == 0
        elif character == '"' and self._depth:
            self._in_string = True
        else:
            self.is_broken = True
            return 0
        return 1
