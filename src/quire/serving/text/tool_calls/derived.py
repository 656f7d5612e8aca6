"""A format read off a chat template: the template writes a call, and the call shows what stands around it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.tool_calls.call_object import CallKeys
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule, write_object
from quire.types.errors import InvalidRequest

Render = Callable[[Sequence[Mapping[str, Any]]], str]
PREFIX = "derived:"
_NAME, _KEY, _VALUE = "quire_probe_name", "quire_probe_key", "quire_probe_value"
_WORDS = "\U000f0000"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_NAMED = re.compile(rf'\{{\s*"([A-Za-z_]+)"\s*:\s*"{_NAME}"\s*,\s*"([A-Za-z_]+)"\s*:\s*$')
_MIN_MARK = 3  # characters; a shorter mark stands in words too
_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class DerivedForm:
    """Calls of the form `start NAME middle ARGUMENTS end`; with keys, `start {NAME_KEY: ..., ARGUMENTS_KEY: ...} end`.

    `end` may be empty: a call then ends with its JSON.
    """

    start: str
    end: str
    middle: str = ""
    name_key: str = ""
    arguments_key: str = ""

    @property
    def name(self) -> str:
        """The form as the name of a parser, from which `form_named` makes it again."""
        return PREFIX + json.dumps(asdict(self), ensure_ascii=False)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.start, self.middle, self.end) if mark)

    @property
    def shape(self) -> CallShape:
        if self.name_key:
            return CallShape(write_object(self.name_key, self.arguments_key, after=self.end), mark=self.start)
        return CallShape(self._write, mark=self.start)

    def _write(self, lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG002
        pieces = (lark.fixed(function["name"] + self.middle), arguments_rule(function), lark.fixed(self.end))
        return " ".join(piece for piece in pieces if piece)

    def reader_class(self) -> type[CallReader]:
        """Return a reader of this form."""
        form = self

        class Reader(DerivedReader):
            marks = (form.start,)
            _form = form

        return Reader


def form_named(name: str) -> DerivedForm:
    return DerivedForm(**json.loads(name.removeprefix(PREFIX)))


def derive_form(render: Render) -> DerivedForm | None:
    """Let the template write a conversation with a call and without it, and read the form off the difference.

    Returns None where that shows no call, or no mark before it.
    """
    asked = {"role": "user", "content": "?"}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    called = _render(render, [asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    plain, worded = (_render(render, [asked, {"role": "assistant", "content": words}]) for words in ("", _WORDS))
    arguments = _ARGUMENTS.search(called)
    if arguments is None or _NAME not in called[: arguments.start()]:
        return None
    prompt = worded.partition(_WORDS)[0]  # what stands before the words of an answer
    shared = _shared_prefix(called, prompt)
    before, behind = called[shared : arguments.start()], called[arguments.end() :]
    behind = behind.removesuffix(plain[len(prompt) :])
    named = _NAMED.search(before)
    if named is not None:
        start, (name_key, arguments_key) = before[: named.start()], named.groups()
        if not behind.lstrip().startswith("}"):
            return None
        return _form(start, behind.lstrip()[1:], "", name_key, arguments_key)
    start, _, middle = before.partition(_NAME)
    if not middle or '"' in middle:
        return None
    return _form(start, behind, middle)


def _form(start: str, end: str, middle: str, name_key: str = "", arguments_key: str = "") -> DerivedForm | None:
    """Leave out white space, which models write as they like, and lists, which a reader takes anyway."""
    start, end = start.strip(), end.strip()
    start, end = start.removesuffix("[").rstrip(), end.removeprefix("]").lstrip()
    return DerivedForm(start, end, middle, name_key, arguments_key) if len(start) >= _MIN_MARK else None


def _render(render: Render, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return render(messages)
    except InvalidRequest:
        return ""


def _shared_prefix(first: str, second: str) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


class DerivedReader(CallReader):
    """Reads calls of a derived form; white space around its marks is free."""

    _form: DerivedForm

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        form = self._form
        if form.name_key:
            keys = CallKeys(form.name_key, (form.arguments_key,))
            if not (yield from self._read_list(keys)):
                return False
        elif not (yield from self._read_named(form.middle.strip())):
            return False
        if form.end:
            yield from self._skip_space()
            yield from self._comes(form.end)
        return True

    def _read_named(self, middle: str) -> Reading[bool]:
        yield from self._skip_space()
        name = (yield from self._until(middle or "{", most=_NAME_CHARACTERS)).strip()
        if not self._ended_by or not name or "\n" in name:
            return False
        if not middle:
            self._buffer = "{" + self._buffer
            self._taken.pop()
        yield from self._skip_space()
        if self._buffer[0] != "{":
            return False
        self._begin_call(name)
        yield from self._read_object()
        return True
