"""Slices: sets of tokens that llguidance allows all at once instead of checking them one by one.

A slice is a regex. If a grammar's state allows every text of that regex, llguidance allows all tokens that match it
without checking each of them; otherwise it checks them one by one. So slices change how long a mask takes, and never
which tokens it allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_JSON_TEXT = r'[^"\\\x00-\x1F\x7F]'  # what a JSON string may contain without an escape
LONGEST = 24  # characters; few tokens are longer

LETTER_SLICES = tuple(f"{letters}{{1,{LONGEST}}}" for letters in ("[a-z]", "[a-z ]", "[a-zA-Z]", "[a-zA-Z ]"))
GENERAL_SLICES = (*(f"{_JSON_TEXT}{{1,{length}}}" for length in (6, 12, LONGEST)), f"{_JSON_TEXT}+", *LETTER_SLICES)

MAX_CLASSES = 4  # classes per grammar that get slices
MIN_REPEATS = 8  # a class with fewer repetitions never allows long tokens

_REGEX_LITERAL = re.compile(r"/((?:\\.|[^/\\\n])+)/")
_REPEATED_CLASS = re.compile(r"(\[\^?\]?(?:\\.|[^\]\\\[])*\]|\\[wWSDpP](?:\{\w+\}|))(?:([*+])|\{(\d*)(,?)(\d*)\})")
_SET_OPERATIONS = ("&&", "--", "~~", "||")


def repeated_classes(grammar: str) -> dict[str, int]:
    """Return the character classes that a grammar's regexes repeat, and how many characters each may match in a row.

    Reads regexes between slashes and the patterns of JSON schemas. Missing a class only costs time.
    """
    found: dict[str, int] = {}
    for pattern in _patterns(grammar):
        for match in _REPEATED_CLASS.finditer(pattern):
            name, is_endless, least, comma, most = match.groups()
            repeats = LONGEST if is_endless or (comma and not most) else int(most or least or 0)
            if repeats >= MIN_REPEATS and not any(operation in name for operation in _SET_OPERATIONS):
                found[name] = max(found.get(name, 0), min(repeats, LONGEST))
            if len(found) == MAX_CLASSES:
                return found
    return found


def slices_of(name: str, repeats: int) -> tuple[str, ...]:
    """Return slices for a class that is repeated `repeats` times: the longest, and shorter ones for states that allow
    fewer characters."""
    lengths = {max(2, repeats // part) for part in (1, 2, 4)}
    return tuple(f"{name}{{1,{length}}}" for length in sorted(lengths))


def _patterns(grammar: str) -> Iterator[str]:
    """Yield all regexes in the text of a grammar, those of JSON schemas first."""
    decoder, rest, place = json.JSONDecoder(), [], 0
    for match in re.finditer(r"%json\s*", grammar):
        if match.start() < place:
            continue  # inside the schema before it
        try:
            schema, end = decoder.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            continue
        yield from _schema_patterns(schema)
        rest.append(grammar[place : match.start()])
        place = end
    rest.append(grammar[place:])
    for match in _REGEX_LITERAL.finditer("\n".join(rest)):
        yield match[1]


def _schema_patterns(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
