"""`[weather(city="Ulm"), time()]`: Llama 3.2, Llama 4 and other models that write calls in Python syntax."""

from __future__ import annotations

import json
import re

from quire.serving.text.lark import LarkGrammar, json_rule
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.python_values import python_to_json
from quire.serving.text.tool_calls.shape import CallShape, Function, parameters_of
from quire.types.errors import InvalidRequest

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,255}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_OPENING, _CLOSING = "([{", ")]}"


def _write_call(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    """Return the expression of a call whose values are JSON. Optional parameters may be missing; the order is that of
    the schema."""
    first = rest = '")"'  # the rest of the call if no parameter, or at least one, precedes it
    for name, schema, is_required in reversed(parameters_of(function)):
        if not _KEY.fullmatch(name):
            reason = f"{name!r:.80} of {function['name']} is not a Python name, and this model writes Python calls"
            raise InvalidRequest("tools", reason, "rename it")
        value = f"{lark.fixed(f'{name}=')} {json_rule(schema)}"
        if is_required:
            first, rest = f"{value} {rest}", f'", " {value} {rest}'
        else:
            first, rest = f"({value} {rest} | {first})", f'(", " {value})? {rest}'
    return f"{lark.fixed(function['name'] + '(')} {first}"


SHAPE = CallShape(_write_call, is_listed=True, opening="[", separator=", ", closing="]")


class PythonicReader(CallReader):
    """Reads a list of calls of known tools at the start of an answer, or after the mark in any place."""

    marks = (START,)
    end = END

    def _read_start(self) -> Reading[None]:
        if not (yield from self._read_all()):
            self._put_back()

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        if not (yield from self._read_all()):
            return False
        yield from self._skip_space()
        yield from self._accept(self.end)
        return True

    def _read_all(self, *, needs_bracket: bool = True) -> Reading[bool]:
        yield from self._skip_space()
        is_listed = bool((yield from self._accept("[")))
        if needs_bracket and not is_listed:
            return False
        is_call = False
        while True:
            yield from self._skip_space("," if is_call else "")
            if is_call and (yield from self._accept("]" if is_listed else self.end)):
                return True
            name = yield from self._read_name()
            if not name:
                return is_call
            self._begin_call(name)
            is_call = True
            yield from self._read_arguments()

    def _read_name(self) -> Reading[str]:
        """Take a known name and its opening bracket, and return the name; "" if there is none."""
        while True:
            found = _NAME.match(self._buffer)
            name = found.group() if found else ""
            if self._buffer[len(name) : len(name) + 1] == "(":
                if not name or not self._book.knows(name):
                    return ""
                self._take(len(name) + 1)
                return name
            if name != self._buffer or not self._may_be_known(name):
                return ""
            yield from self._more()

    def _may_be_known(self, name: str) -> bool:
        return self._book.known is None or any(known.startswith(name) for known in self._book.known)

    def _read_arguments(self) -> Reading[None]:
        """Read `key=value` pairs up to the closing bracket. Each is passed on when it is complete."""
        self._taken = []
        count = 0
        while True:
            text = yield from self._read_argument()
            key, is_pair, value = text.partition("=")
            if is_pair and _KEY.fullmatch(key.strip()):
                lead = ", " if count else "{"
                self._add_arguments(f"{lead}{json.dumps(key.strip())}: {python_to_json(value)}")
                count += 1
            if self._take(1) == ")":
                break
            self._taken = []
        self._add_arguments("}" if count else "{}")
        self._end_call()

    def _read_argument(self) -> Reading[str]:
        """Take the text of one argument. The comma or bracket that ends it stays in the buffer."""
        pieces: list[str] = []
        depth, quote, is_escaped = 0, "", False
        while True:
            for place, character in enumerate(self._buffer):
                if quote:
                    if is_escaped or character == "\\":
                        is_escaped = not is_escaped
                    elif character == quote:
                        quote = ""
                elif character in "\"'":
                    quote = character
                elif not depth and character in ",)":
                    pieces.append(self._take(place))
                    return "".join(pieces)
                elif character in _OPENING:
                    depth += 1
                elif character in _CLOSING:
                    depth -= 1
            pieces.append(self._take(len(self._buffer)))
            yield from self._more()


class MarkedPythonicReader(PythonicReader):
    """Reads calls of any tool after the mark: in a list, or one per line."""

    def _read_start(self) -> Reading[None]:
        yield from ()

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        if not (yield from self._read_all(needs_bracket=False)):
            return False
        yield from self._skip_space()
        yield from self._accept(self.end)
        return True


class Lfm2Reader(MarkedPythonicReader):
    """Reads `<|tool_call_start|>[weather(city="Ulm")]<|tool_call_end|>`: LFM2."""

    marks = ("<|tool_call_start|>",)
    end = "<|tool_call_end|>"


class Olmo3Reader(MarkedPythonicReader):
    """Reads `<function_calls>`, a call per line and `</function_calls>`: Olmo 3."""

    marks = ("<function_calls>",)
    end = "</function_calls>"


LFM2_SHAPE = CallShape(
    _write_call,
    mark=Lfm2Reader.marks[0],
    is_listed=True,
    opening="[",
    separator=", ",
    closing=f"]{Lfm2Reader.end}",
)
OLMO3_SHAPE = CallShape(_write_call, mark=Olmo3Reader.marks[0], is_listed=True, separator="\n", closing=Olmo3Reader.end)
