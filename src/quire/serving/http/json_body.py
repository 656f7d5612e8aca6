"""Decodes JSON strictly: no NaN, no lone surrogates, bounded nesting, bounded whole numbers."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any

import msgspec

from quire.types.errors import InvalidRequest

_LOWEST, _HIGHEST = -(2**63), 2**64 - 1
_DECODER = msgspec.json.Decoder()


def decode_json(body: bytes, max_depth: int) -> Any:
    """Return the value of a JSON body. Of repeated names in an object, the last counts. A byte order mark, which
    editors and shells on Windows write, is skipped. Raises InvalidRequest."""
    body = body.removeprefix(BOM_UTF8)
    if not body.strip():
        raise InvalidRequest("body", "is empty", "send a JSON object")
    try:
        value = _DECODER.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is not UTF-8", "send JSON encoded as UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {_place(error)}", "send a JSON object") from None
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(value, max_depth)
    return value


def check_numbers(where: str, value: Any) -> None:
    """Raise InvalidRequest if free-form data contains a whole number outside 64 bits."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, int) and not _LOWEST <= item <= _HIGHEST:
            raise InvalidRequest(where, "contains a whole number that does not fit in 64 bits", "send a smaller one")


def _check_depth(value: Any, max_depth: int) -> None:
    """Raise InvalidRequest if lists and objects are nested too deeply. Iterates level by level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(inner for inner in item.values() if isinstance(inner, dict | list))
            elif {dict, list} & set(map(type, item)):
                below.extend(inner for inner in item if isinstance(inner, dict | list))
        if not below:
            return
        level = below
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest("body", f"is nested deeper than {max_depth} levels", "flatten it")


def _place(error: Exception) -> str:
    """Return the parser's message, without details about the program."""
    text = str(error)
    return text.removeprefix("JSON is malformed: ").partition(" - at ")[0][:120]
