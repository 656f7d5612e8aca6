"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule, write_object

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"([A-Za-z0-9_.\-]{1,256})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s{0,32}(?=\{)")
_HALF_NAME = re.compile(
    r"[A-Za-z0-9_.\-]{0,256}(?:\[(?:[A-Z_]{0,7}|CALL_ID\][A-Za-z0-9]{0,64}(?:\[[A-Z]{0,4})?|ARGS))?\]?\s{0,32}"
)


def shape(special: Mapping[str, int]) -> CallShape:
    """Return the newer form if the vocabulary has its mark."""
    if ARGUMENTS in special:
        return CallShape(_write_named, mark=MARK)
    return CallShape(
        write_object("name", "arguments"), mark=MARK, is_listed=True, opening="[", separator=", ", closing="]"
    )


def _write_named(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    return f"{lark.fixed(function['name'] + ARGUMENTS)} {arguments_rule(function)}"


class MistralReader(CallReader):
    """Reads a list of calls, or one name with its arguments, after each mark."""

    marks = (MARK,)

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        yield from self._skip_space()
        if self._buffer[:1] == "[":
            return (yield from self._read_list())
        while (found := _NAME.match(self._buffer)) is None:
            if not _HALF_NAME.fullmatch(self._buffer):
                return False
            yield from self._more()
        self._take(found.end())
        self._begin_call(found.group(1))
        yield from self._read_object()
        return True
