"""`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...`: DeepSeek V3, R1 and V3.1.

V3 and R1 write `function<｜tool▁sep｜>NAME`, a line break and the arguments in a fenced block; V3.1 writes
`NAME<｜tool▁sep｜>` and the arguments.
"""

from __future__ import annotations

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule

CALLS_START, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"
_NAME_CHARACTERS = 256


def _write_fenced(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{START}function{SEPARATOR}{function['name']}\n{FENCE}\n"
    tail = f"\n{FENCE_END}{END}"
    return f"{lark.fixed(head)} {arguments_rule(function)} {lark.fixed(tail)}"


def _write_plain(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{START}{function['name']}{SEPARATOR}"
    return f"{lark.fixed(head)} {arguments_rule(function)} {lark.fixed(END)}"


SHAPE_V3 = CallShape(_write_fenced, mark=CALLS_START, is_listed=True, separator="\n", closing=CALLS_END)
SHAPE_V31 = CallShape(_write_plain, mark=CALLS_START, is_listed=True, closing=CALLS_END)


class DeepSeekReader(CallReader):
    """Reads both forms. The marks around all calls may be missing."""

    marks = (CALLS_START, START)

    def _read_calls(self, mark: str) -> Reading[bool]:
        is_call = False
        if mark == CALLS_START:
            yield from self._skip_space()
            if not (yield from self._accept(START)):
                return False
        while True:
            if not (yield from self._read_one()):
                return is_call
            is_call = True
            yield from self._skip_space()
            if (yield from self._accept(CALLS_END, START)) != START:
                return True

    def _read_one(self) -> Reading[bool]:
        name = (yield from self._take_until(SEPARATOR, most=_NAME_CHARACTERS)).strip()
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
        self._begin_call(name)
        yield from self._read_object()
        yield from self._skip_space()
        if is_fenced:
            yield from self._accept(FENCE_END)
            yield from self._skip_space()
        yield from self._accept(END)
        return True
