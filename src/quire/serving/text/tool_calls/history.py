"""Writes the calls of earlier messages for models whose templates describe tools but write no calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.serving.text.tool_calls import granite, pythonic
from quire.serving.text.tool_calls.formats import known_in
from quire.serving.text.tool_calls.marked_json import Phi4Reader

Call = Mapping[str, Any]  # name and arguments


def history_writer(template: str) -> Callable[[Sequence[Call]], str] | None:
    """Return the function that writes calls in the format of a template; None: it is unknown, or needs no help."""
    return _WRITERS.get(known_in(template) or "")


def _granite(calls: Sequence[Call]) -> str:
    return granite.MARK + json.dumps(list(calls), ensure_ascii=False)


def _phi4(calls: Sequence[Call]) -> str:
    return f"{Phi4Reader.marks[0]}{json.dumps(list(calls), ensure_ascii=False)}{Phi4Reader.end}"


def _lfm2(calls: Sequence[Call]) -> str:
    written = ", ".join(f"{call['name']}({_keywords(call['arguments'])})" for call in calls)
    return f"{pythonic.Lfm2Reader.marks[0]}[{written}]{pythonic.Lfm2Reader.end}"


def _keywords(arguments: Any) -> str:
    values = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


_WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "granite": _granite,
    "phi4_mini_json": _phi4,
    "lfm2": _lfm2,
}
