"""Calls as JSON objects between marks, or in a list between them: Hunyuan A13B, Jamba, Command, InternLM and others."""

from __future__ import annotations

import json
from dataclasses import dataclass

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.tool_calls.call_object import KEYS, CallKeys
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, WriteCall, arguments_rule, write_object

FUNCTOOLS = "functools"  # precedes the list of calls at the start of an answer of Phi-4-mini


class ObjectReader(CallReader):
    """Reads one or more objects, or a list of them, after a mark; then `end`, which may be missing."""

    keys: CallKeys = KEYS
    end = ""

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        if not (yield from self._read_list(self.keys)):
            return False
        yield from self._read_further()
        if self.end:
            yield from self._skip_space()
            yield from self._accept(self.end)
        return True

    def _read_further(self) -> Reading[None]:
        """Read more objects before the end mark: some models write one per line."""
        self._taken = []
        while self.end:
            yield from self._skip_space()
            if self._buffer[0] not in "{[" or not (yield from self._read_list(self.keys)):
                return
            self._taken = []


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """The texts around the objects. `shape` is what a grammar lets the model write; readers take objects and lists."""

    start: str
    end: str = ""
    keys: CallKeys = KEYS
    shape: CallShape

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.start, self.end) if mark)

    def reader_class(self) -> type[ObjectReader]:
        form = self

        class Reader(ObjectReader):
            marks = (form.start,)
            keys = form.keys
            end = form.end

        return Reader


class Phi4Reader(ObjectReader):
    """Reads a list behind `functools` at the start of an answer, or behind the mark of Phi-4-mini's vocabulary."""

    marks = ("<|tool_call|>",)
    end = "<|/tool_call|>"

    def _read_start(self) -> Reading[None]:
        yield from self._skip_space()
        if not (yield from self._accept(FUNCTOOLS)) or not (yield from self._read_list()):
            self._put_back()


PHI4_SHAPE = CallShape(
    write_object("name", "arguments"), is_listed=True, opening=f"{FUNCTOOLS}[", separator=", ", closing="]"
)
XLAM_SHAPE = CallShape(write_object("name", "arguments"), is_listed=True, opening="[", separator=", ", closing="]")


def _listed(start: str, end: str, write: WriteCall | None = None, line: str = "") -> CallShape:
    return CallShape(
        write or write_object("name", "arguments"),
        mark=start,
        is_listed=True,
        opening=f"[{line}",
        separator=f",{line or ' '}",
        closing=f"{line[:1]}]{end}",
    )


def _alone(start: str, end: str, *, before: str = "", after: str = "", arguments: str = "arguments") -> JsonForm:
    shape = CallShape(write_object("name", arguments, before=before, after=f"{after}{end}"), mark=start, separator="\n")
    return JsonForm(start=start, end=end, shape=shape)


def _write_command(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = lark.fixed('{"tool_call_id": "')
    named = lark.fixed(f'", "tool_name": {json.dumps(function["name"])}, "parameters": ')
    return f"{head} /[0-9]{{1,2}}/ {named} {arguments_rule(function)} {lark.fixed('}')}"


_CALLS, _CALLS_END = "<tool_calls>", "</tool_calls>"
_ACTION, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
JSON_FORMS: dict[str, JsonForm] = {
    "hunyuan_a13b": JsonForm(start=_CALLS, end=_CALLS_END, shape=_listed(_CALLS, _CALLS_END)),
    "minimax_m1": JsonForm(
        start=_CALLS,
        end=_CALLS_END,
        shape=CallShape(
            write_object("name", "arguments"),
            mark=_CALLS,
            is_listed=True,
            opening="\n",
            separator="\n",
            closing=f"\n{_CALLS_END}",
        ),
    ),
    "cohere_command": JsonForm(
        start=_ACTION,
        end=_ACTION_END,
        keys=CallKeys("tool_name", ("parameters",), before="tool_call_id"),
        shape=_listed(_ACTION, _ACTION_END, _write_command, "\n    "),
    ),
    "internlm": _alone("<|action_start|><|plugin|>", "<|action_end|>", before="\n", arguments="parameters"),
    "longcat": _alone("<longcat_tool_call>", "</longcat_tool_call>", before="\n", after="\n"),
    "granite_20b_fc": _alone("<function_call>", "", before=" "),
}
