"""`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...`: DeepSeek V3, R1 and V3.1, and with other marks Kimi K2.

V3 and R1 write `function<｜tool▁sep｜>NAME`, a line break and the arguments in a fenced block; V3.1 writes
`NAME<｜tool▁sep｜>` and the arguments. Kimi writes the call's id, `functions.NAME:NUMBER`, in place of the name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule


class Marks(NamedTuple):
    """The marks around all calls, around one call, and between its name and its arguments."""

    calls_start: str
    start: str
    separator: str
    end: str
    calls_end: str


DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
FENCE, FENCE_END = "```json", "```"
_NAME_CHARACTERS = 256
KIMI_ID = re.compile(r"functions\.([A-Za-z0-9_.\-]{1,256}):\d{1,6}")
_HALF_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d*)?")  # as models misspell it


def _write_fenced(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{DEEPSEEK.start}function{DEEPSEEK.separator}{function['name']}\n{FENCE}\n"
    tail = f"\n{FENCE_END}{DEEPSEEK.end}"
    return f"{lark.fixed(head)} {arguments_rule(function)} {lark.fixed(tail)}"


def _write_plain(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{DEEPSEEK.start}{function['name']}{DEEPSEEK.separator}"
    return f"{lark.fixed(head)} {arguments_rule(function)} {lark.fixed(DEEPSEEK.end)}"


def _write_kimi(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{KIMI.start}functions.{function['name']}:"
    arguments = f"{lark.fixed(KIMI.separator)} {arguments_rule(function)} {lark.fixed(KIMI.end)}"
    return f"{lark.fixed(head)} /[0-9]{{1,4}}/ {arguments}"


SHAPE_V3 = CallShape(
    _write_fenced, mark=DEEPSEEK.calls_start, is_listed=True, separator="\n", closing=DEEPSEEK.calls_end
)
SHAPE_V31 = CallShape(_write_plain, mark=DEEPSEEK.calls_start, is_listed=True, closing=DEEPSEEK.calls_end)
SHAPE_KIMI = CallShape(_write_kimi, mark=KIMI.calls_start, is_listed=True, closing=KIMI.calls_end)


class DeepSeekReader(CallReader):
    """Reads both forms. The marks around all calls may be missing."""

    marks = DEEPSEEK[:2]
    _marks = DEEPSEEK

    def _read_calls(self, mark: str) -> Reading[bool]:
        marks, is_call = self._marks, False
        if mark == marks.calls_start:
            yield from self._skip_space()
            if not (yield from self._accept(marks.start)):
                return False
        while True:
            if not (yield from self._read_one()):
                return is_call
            is_call = True
            yield from self._skip_space()
            if (yield from self._accept(marks.calls_end, marks.start)) != marks.start:
                return True

    def _read_one(self) -> Reading[bool]:
        name = (yield from self._take_until(self._marks.separator, most=_NAME_CHARACTERS)).strip()
        if not self._ended_by:
            return False
        is_fenced = name == "function"
        if is_fenced:
            name = (yield from self._take_until("\n", most=_NAME_CHARACTERS)).strip()
            yield from self._skip_space()
            if not (yield from self._accept(FENCE)):
                return False
        yield from self._skip_space()
        if not name or self._buffer[0] != "{":
            return False
        self._begin_named(name)
        yield from self._read_object()
        yield from self._skip_space()
        if is_fenced:
            yield from self._accept(FENCE_END)
            yield from self._skip_space()
        yield from self._accept(self._marks.end)
        return True

    def _begin_named(self, name: str) -> None:
        self._begin_call(name)


class KimiReader(DeepSeekReader):
    """Reads the calls of Kimi K2. The model's own ids are kept: its template writes them into the conversation."""

    marks = KIMI[:2]
    _marks = KIMI

    def _begin_named(self, name: str) -> None:
        found = _HALF_ID.fullmatch(name)
        self._begin_call(found.group(1) if found else name, name if KIMI_ID.fullmatch(name) else "")
