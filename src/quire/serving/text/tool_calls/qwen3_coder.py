"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3 Coder.

Strings are written without quotes; values of all other types are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.serving.text.lark import LarkGrammar, json_rule, one_of
from quire.serving.text.parts import held_back
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.hermes import END, START
from quire.serving.text.tool_calls.python_values import text_to_json, types_of
from quire.serving.text.tool_calls.shape import CallShape, Function, parameters_of

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME_CHARACTERS = 256


def _write_call(lark: LarkGrammar, prefix: str, function: Function) -> str:
    """Return the expression of a call with its parameters in the order of the schema."""
    pieces = [lark.fixed(f"\n{FUNCTION}{function['name']}>\n")]
    for place, (name, schema, is_required) in enumerate(parameters_of(function)):
        end = f"\n{PARAMETER_END}\n"
        values = schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            value = f"{one_of(map(lark.fixed, values))} {lark.fixed(end)}"
        elif "string" in types_of(schema) or not types_of(schema):
            value = lark.text_until(f"{prefix}_value_{place}", end)
        else:
            value = f"{json_rule(schema)} {lark.fixed(end)}"
        head = f"{PARAMETER}{name}>\n"
        whole = f"{lark.fixed(head)} {value}"
        pieces.append(whole if is_required else f"({whole})?")
    pieces.append(lark.fixed(f"{FUNCTION_END}\n{END}"))
    return " ".join(pieces)


SHAPE = CallShape(_write_call, mark=START, separator="\n")


class Qwen3CoderReader(CallReader):
    """Passes on strings while they arrive, and other values when they are complete."""

    marks = (START, FUNCTION)

    def _read_calls(self, mark: str) -> Reading[bool]:
        if mark == START:
            yield from self._skip_space()
            if not (yield from self._accept(FUNCTION)):
                return False
        name = (yield from self._take_until(">", "\n", most=_NAME_CHARACTERS)).strip()
        if self._ended_by != ">" or not name:
            return False
        self._begin_call(name)
        self._taken = []
        count, self._missing = 0, list(self._properties(name))
        while True:
            yield from self._skip_space()
            came = yield from self._accept(PARAMETER, FUNCTION_END)
            if came != PARAMETER:
                break
            key = (yield from self._take_until(">", most=_NAME_CHARACTERS)).strip()
            yield from self._read_value(name, key, "{" if count == 0 else ", ")
            count += 1
        self._add_arguments("}" if count else "{}")
        self._end_call()
        yield from self._skip_space()
        yield from self._accept(END)
        return True

    def _properties(self, function: str) -> Mapping[str, Any]:
        properties = self._parameters.get(function, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def _value_ends(self) -> tuple[str, ...]:
        """Return the texts that end a value: its tag, and what follows where the model forgot that.

        Only a parameter that is still missing ends the one before it, so that values may show tags.
        """
        following = (f"\n{PARAMETER}{name}>" for name in self._missing)
        return PARAMETER_END, f"\n{FUNCTION_END}\n{END}", *following

    def _end_value(self) -> None:
        """Put back what ended a value if it was not its own tag."""
        if self._ended_by != PARAMETER_END:
            self._buffer = self._ended_by + self._buffer

    def _read_value(self, function: str, key: str, lead: str) -> Reading[None]:
        if key in self._missing:
            self._missing.remove(key)
        schema = self._properties(function).get(key)
        if types_of(schema) not in (frozenset(), frozenset({"string"})):
            text = (yield from self._take_until(*self._value_ends())).removeprefix("\n").removesuffix("\n")
            self._end_value()
            self._add_arguments(f"{lead}{json.dumps(key)}: {text_to_json(text, schema)}")
            self._taken = []
            return
        yield from self._skip_line_break()
        self._add_arguments(f'{lead}{json.dumps(key)}: "')
        yield from self._pass_string()
        self._add_arguments('"')
        self._taken = []

    def _skip_line_break(self) -> Reading[None]:
        while not self._buffer:
            yield from self._more()
        if self._buffer[0] == "\n":
            self._take(1)

    def _pass_string(self) -> Reading[None]:
        """Pass on the text up to the end tag as the content of a JSON string, without the line break before the tag."""
        ends = self._value_ends()
        while True:
            found = [(place, end) for end in ends if (place := self._buffer.find(end)) >= 0]
            if found:
                place, self._ended_by = min(found)
                text = self._take(place)
                self._add_arguments(_escaped(text.removesuffix("\n") if self._ended_by == PARAMETER_END else text))
                self._take(len(self._ended_by))
                self._end_value()
                return
            held = max(held_back(self._buffer, end) for end in (f"\n{PARAMETER_END}", *ends))
            self._add_arguments(_escaped(self._take(len(self._buffer) - held)))
            self._taken = []
            yield from self._more()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
