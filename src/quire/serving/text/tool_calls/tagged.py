"""Calls whose parameters are enclosed in tags: Qwen3 Coder, GLM, MiniMax M2, Seed-OSS, DeepSeek V3.2, Step3 and others.

`<function=NAME><parameter=KEY>value</parameter></function>` and the like. Strings are written without quotes; values of
all other types are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.serving.text.lark import LarkGrammar, json_rule, one_of
from quire.serving.text.parts import held_back
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.python_values import text_to_json, types_of
from quire.serving.text.tool_calls.shape import CallShape, Function, parameters_of

_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of one format."""

    start: str = ""  # before every call; with is_listed, before the first
    end: str = ""  # after every call; with is_listed, after the last
    function: tuple[str, str]  # before and after the name; if "" comes after it, it ends with its line or at a tag
    function_end: str
    parameter: str  # before a key
    key_ends: tuple[str, ...]  # after a key: of a string, and of another value if that differs
    value_start: str = ""
    parameter_end: str
    is_listed: bool = False
    on_lines: bool = False  # one line break before and one after a value do not belong to it

    # white space that the model's chat template writes; readers accept any
    after_start: str = ""
    after_name: str = ""
    around_value: str = ""
    between: str = ""  # after a parameter, and between a key and the tag before its value
    separator: str = ""  # between calls
    before_end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that begin a call."""
        alone = () if self.is_listed and self.start else self.function[:1]
        return tuple(mark for mark in (self.start, *alone) if mark)

    @property
    def tokens(self) -> tuple[str, ...]:
        """All tags, any of which may be a special token."""
        tags = (self.start, self.end, *self.function, self.function_end, self.parameter, *self.key_ends)
        return tuple(tag for tag in (*tags, self.value_start, self.parameter_end) if len(tag) > len('">'))

    @property
    def shape(self) -> CallShape:
        closing = self.before_end + self.end
        if self.is_listed:
            return CallShape(
                self._write,
                mark=self.start,
                is_listed=True,
                opening=self.after_start,
                separator=self.separator,
                closing=closing,
            )
        return CallShape(self._write, mark=self.start or self.function[0], separator=self.separator)

    def _write(self, lark: LarkGrammar, prefix: str, function: Function) -> str:
        """Return the expression of a call with its parameters in the order of the schema."""
        lead = "" if self.is_listed else self.after_start
        before, after = self.function if self.start else ("", self.function[1])
        pieces = [lark.fixed(lead + before + function["name"] + after + self.after_name)]
        for place, (name, schema, is_required) in enumerate(parameters_of(function)):
            whole = self._write_parameter(lark, f"{prefix}_value_{place}", name, schema)
            pieces.append(whole if is_required else f"({whole})?")
        pieces.append(lark.fixed(self.function_end + ("" if self.is_listed else self.before_end + self.end)))
        return " ".join(piece for piece in pieces if piece)

    def _write_parameter(self, lark: LarkGrammar, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        end = f"{self.around_value}{self.parameter_end}{self.between}"
        values, types = schema.get("enum"), types_of(schema)
        key_end = self.key_ends[0]
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            value = f"{one_of(map(lark.fixed, values))} {lark.fixed(end)}"
        elif "string" in types or not types:
            value = lark.text_until(rule, end)
        else:
            key_end = self.key_ends[-1]
            value = f"{json_rule(schema)} {lark.fixed(end)}"
        before_value = f"{self.between}{self.value_start}" if self.value_start else ""
        return f"{lark.fixed(f'{self.parameter}{name}{key_end}{before_value}{self.around_value}')} {value}"


def tag_reader(form: Tags) -> type[TagReader]:
    """Return the reader class of a format."""

    class Reader(TagReader):
        marks = form.marks
        tags = form

    return Reader


class TagReader(CallReader):
    """Passes on strings while they arrive, and other values when they are complete."""

    tags: Tags

    def _read_calls(self, mark: str) -> Reading[bool]:
        tags, is_call = self.tags, False
        before = tags.function[0]
        if mark == tags.start:
            yield from self._skip_space()
            if before and not (yield from self._accept(before)):
                return False
        while True:
            if not (yield from self._read_one()):
                return is_call
            is_call = True
            ends = tuple(text for text in (tags.end, before if tags.is_listed and tags.start else "") if text)
            if not ends:
                return True
            yield from self._skip_space()
            if (yield from self._accept(*ends)) != before:
                return True

    def _read_one(self) -> Reading[bool]:
        """Read a call from its name on. Returns False if there is no name."""
        name = yield from self._read_name()
        if not name:
            return False
        tags = self.tags
        self._begin_call(name)
        self._taken = []
        count, self._missing = 0, list(self._properties(name))
        while True:
            yield from self._skip_space()
            if (yield from self._accept(tags.parameter, tags.function_end)) != tags.parameter:
                break
            key = (yield from self._take_until(*tags.key_ends, most=_NAME_CHARACTERS)).strip()
            if not self._ended_by:
                break
            is_string = len(tags.key_ends) > 1 and self._ended_by == tags.key_ends[0]
            if tags.value_start:
                yield from self._skip_space()
                yield from self._accept(tags.value_start)
            yield from self._read_value(name, key, "{" if count == 0 else ", ", is_string=is_string)
            count += 1
        self._add_arguments("}" if count else "{}")
        self._end_call()
        return True

    def _read_name(self) -> Reading[str]:
        """Take a name and the text after it; an empty text if there is none."""
        tags = self.tags
        after = tags.function[1]
        ends = (after, "\n") if after else ("\n", tags.parameter, tags.function_end)
        name = (yield from self._take_until(*ends, most=_NAME_CHARACTERS)).strip()
        if not self._ended_by or (after and self._ended_by != after) or len(name.split()) != 1:
            return ""
        if self._ended_by in (tags.parameter, tags.function_end):
            self._buffer = self._ended_by + self._buffer
        return name

    def _properties(self, function: str) -> Mapping[str, Any]:
        properties = self._parameters.get(function, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def _value_ends(self) -> tuple[str, ...]:
        """Return the texts that end a value: its end tag and, with `on_lines`, what follows a value whose end tag is
        missing: the end of the call, or a parameter that the call does not have yet. A value may contain other tags."""
        tags = self.tags
        if not tags.on_lines:
            return (tags.parameter_end,)
        following = (f"\n{tags.parameter}{name}{tags.key_ends[0]}" for name in self._missing)
        return tags.parameter_end, f"\n{tags.function_end}\n{tags.end}", *following

    def _end_value(self) -> None:
        """Put back what ended a value if it was not its own tag."""
        if self._ended_by != self.tags.parameter_end:
            self._buffer = self._ended_by + self._buffer

    def _read_value(self, function: str, key: str, lead: str, *, is_string: bool) -> Reading[None]:
        if key in self._missing:
            self._missing.remove(key)
        schema = self._properties(function).get(key)
        is_typed = len(self.tags.key_ends) > 1  # the tag says whether the value is a string
        if (is_typed and not is_string) or (
            not is_typed and types_of(schema) not in (frozenset(), frozenset({"string"}))
        ):
            text = yield from self._take_until(*self._value_ends())
            if self.tags.on_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            self._end_value()
            value = _typed(text, schema) if is_typed else text_to_json(text, schema)
            self._add_arguments(f"{lead}{json.dumps(key)}: {value}")
            self._taken = []
            return
        if self.tags.on_lines:
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
        """Pass on the text up to the end tag as the content of a JSON string, without the line break before the tag
        where values stand on lines."""
        ends, own = self._value_ends(), self.tags.parameter_end
        marks = (f"\n{own}", *ends) if self.tags.on_lines else ends
        while True:
            found = [(place, end) for end in ends if (place := self._buffer.find(end)) >= 0]
            if found:
                place, self._ended_by = min(found)
                text = self._take(place)
                is_line = self.tags.on_lines and self._ended_by == own
                self._add_arguments(_escaped(text.removesuffix("\n") if is_line else text))
                self._take(len(self._ended_by))
                self._end_value()
                return
            held = max(held_back(self._buffer, end) for end in marks)
            self._add_arguments(_escaped(self._take(len(self._buffer) - held)))
            self._taken = []
            yield from self._more()


def _typed(text: str, schema: Mapping[str, Any] | None) -> str:
    """Return a value that its tag calls no string as JSON; if it is none, read it by its schema."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return text_to_json(text, schema)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
