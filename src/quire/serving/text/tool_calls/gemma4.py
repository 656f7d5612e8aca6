"""`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`: Gemma 4, and with other marks FunctionGemma.

Arguments differ from JSON in three ways: strings are enclosed in `<|"|>` and have no escapes, keys have no quotes, and
there is no white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.parts import held_back
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.gemma4_schema import QUOTE, SchemaWriter
from quire.serving.text.tool_calls.python_values import python_to_json, types_of
from quire.serving.text.tool_calls.shape import NO_ARGUMENTS, CallShape, Function

START, END, RESPONSE = "<|tool_call>", "<tool_call|>", "<|tool_response>"
MARKS = (START, END, QUOTE, RESPONSE)
_CALL = "call:"
_NAME_CHARACTERS = 256
_BRACKETS = (",", "}", "]")  # and the end mark: what ends a value without quotes
_JSON_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # of a JSON string, up to its end quote


FUNCTION_START, FUNCTION_END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"


def _write_call(lark: LarkGrammar, prefix: str, function: Function, quote: str = QUOTE, end: str = END) -> str:
    """Return the expression of one call, whose arguments are in alphabetic order, as in Gemma's chat template."""
    parameters = {"type": "object", **(function.get("parameters") or NO_ARGUMENTS)}
    arguments = SchemaWriter(lark, prefix, parameters, quote).arguments()
    return f"{lark.fixed(_CALL + function['name'])} {arguments} {lark.fixed(end)}"


SHAPE = CallShape(_write_call, mark=START)
FUNCTION_GEMMA_SHAPE = CallShape(partial(_write_call, quote=ESCAPE, end=FUNCTION_END), mark=FUNCTION_START)


class Gemma4Reader(CallReader):
    """Emits the characters of a string as they arrive, and any other value when it is complete. The output is JSON."""

    marks: ClassVar[tuple[str, ...]] = (START,)
    _end, _quote, _after = END, QUOTE, (END, RESPONSE)

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        yield from self._skip_space()
        if not (yield from self._accept(_CALL)):
            return False
        name = (yield from self._take_until("{", self._end, "\n", most=_NAME_CHARACTERS)).strip()
        if self._ended_by != "{" or not name:
            return False
        self._begin_call(name)
        self._taken = []
        is_whole = yield from self._read_arguments(name)
        self._end_call()
        if not is_whole:
            yield from self._take_until(self._end)
        yield from self._skip_end()
        return True

    def _skip_end(self) -> Reading[None]:
        """Take what follows a call: its end mark, which some answers repeat, and the mark that ends the turn."""
        while True:
            yield from self._skip_space()
            if not (yield from self._accept(*self._after)):
                return

    def _read_arguments(self, function: str) -> Reading[bool]:
        """Read up to the bracket that closes the arguments. Returns whether it was found; if not, closes all open
        brackets."""
        properties = self._parameters.get(function, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        closing, is_first = ["}"], True  # the brackets that are open, innermost last
        self._add_arguments("{")
        while closing:
            yield from self._skip_space("," if not is_first else "")
            self._taken = []
            ended_by = yield from self._accept("}", "]", self._end)
            if ended_by == self._end:
                self._buffer = self._end + self._buffer
                break
            if ended_by:
                self._add_arguments(closing.pop())
                is_first = False
                continue
            key = ""
            if closing[-1] == "}":
                key = yield from self._read_key()
                if not key:
                    break
            self._add_arguments(("" if is_first else ", ") + (f"{json.dumps(key)}: " if key else ""))
            opened = yield from self._read_value(schemas.get(key) if len(closing) == 1 else None)
            closing += opened
            is_first = bool(opened)
        self._add_arguments("".join(reversed(closing)))
        return not closing

    def _read_key(self) -> Reading[str]:
        """Take a key and its colon. Returns the key, or an empty text if there is none."""
        if (yield from self._accept(self._quote)):
            key = yield from self._take_until(self._quote, self._end, most=_NAME_CHARACTERS)
            yield from self._skip_space()
            is_key = self._ended_by == self._quote and bool((yield from self._accept(":")))
        else:
            ends = (":", "{", "[", *_BRACKETS, self._end)
            key = (yield from self._take_until(*ends, most=_NAME_CHARACTERS)).strip().strip('"')
            is_key = self._ended_by == ":"
            if self._ended_by == self._end:
                self._buffer = self._end + self._buffer
        self._taken = []
        return key if is_key else ""

    def _read_value(self, schema: Mapping[str, Any] | None) -> Reading[str]:
        """Read a string or an unquoted value, or only the opening bracket of an object or a list. Returns the bracket
        that closes it, or an empty text."""
        yield from self._skip_space()
        if bracket := (yield from self._accept("{", "[")):
            self._add_arguments(bracket)
            return "}" if bracket == "{" else "]"
        if (yield from self._accept(self._quote)):
            self._add_arguments('"')
            yield from self._pass_until(lambda text: self._add_arguments(_escaped(text)), self._quote, self._end)
            if self._ended_by == self._end:
                self._buffer = self._end + self._buffer
            self._add_arguments('"')
            return ""
        text = yield from self._read_bare()
        self._add_arguments(_bare_to_json(text, schema))
        return ""

    def _read_bare(self) -> Reading[str]:
        """Take a value without Gemma's quotes, up to the bracket, comma or mark after it. It may have JSON's quotes."""
        read = 1  # the matched characters of a JSON string; no character is matched twice
        while self._buffer[0] == '"':
            characters = _JSON_CHARACTERS.match(self._buffer, read)
            assert characters is not None
            has_end = self._buffer.find(self._end, max(0, read - len(self._end)), characters.end() + 1) >= 0
            read = characters.end()
            if has_end:
                break
            if self._buffer.startswith('"', read):
                return self._take(read + 1)
            yield from self._more()
        pieces: list[str] = []
        while True:
            places = [place for end in (*_BRACKETS, self._end) if (place := self._buffer.find(end)) >= 0]
            if places:
                return "".join([*pieces, self._take(min(places))])
            pieces.append(self._take(len(self._buffer) - held_back(self._buffer, self._end)))
            yield from self._more()


class FunctionGemmaReader(Gemma4Reader):
    """Reads `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`: FunctionGemma."""

    marks = (FUNCTION_START,)
    _end, _quote, _after = FUNCTION_END, ESCAPE, (FUNCTION_END, "<start_function_response>")


def _bare_to_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """Return an unquoted value as JSON: as a string if the schema wants one or if it is no literal."""
    word = text.strip()
    if types_of(schema) == {"string"} and not word.startswith('"'):
        return json.dumps(word, ensure_ascii=False)
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return python_to_json(word)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
