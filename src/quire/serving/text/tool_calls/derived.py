"""Derives a tool format from a chat template: the template renders a call with known values, and the text around these
is the format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.parts import CallArguments, CallBegun, PartReader, Said
from quire.serving.text.tool_calls.call_object import CallKeys
from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.marked_json import ObjectReader
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule, write_object
from quire.types.errors import InvalidRequest

Render = Callable[[Sequence[Mapping[str, Any]]], str]
PREFIX = "derived:"
PROBE_PARAMETERS: dict[str, dict[str, Any]] = {"quire_probe_name": {}}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}  # templates read all three
_PROBE = {"name": "quire_probe_name", "description": "", "parameters": _NO_PARAMETERS}
PROBE_TOOLS = ({"type": "function", "function": _PROBE},)
_NAME, _KEY, _VALUE = "quire_probe_name", "quire_probe_key", "quire_probe_value"
_WORDS = "\U000f0000"
_TAG = re.compile(r"<[^<>]{1,64}>|\[[^\[\]]{1,64}\]")
_OTHER = f"{_VALUE}_other"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}(?:_other)?"\s*\}}')
_NAMED = re.compile(rf'\{{\s*"([A-Za-z_]+)"\s*:\s*"{_NAME}"\s*,\s*"([A-Za-z_]+)"\s*:\s*$')
_MIN_MARK = 3  # characters; a shorter mark may occur in normal text
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
        """The form encoded as the name of a parser. `form_named` decodes it."""
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
        """Return a reader class for this form."""
        form = self

        class Reader(DerivedReader):
            marks = (form.start,)
            end = form.end
            keys = CallKeys(form.name_key, (form.arguments_key,))
            _form = form

        return Reader


def form_named(name: str) -> DerivedForm:
    return DerivedForm(**json.loads(name.removeprefix(PREFIX)))


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Calls as a template renders them: the text of an answer with one call, and of one with two."""

    one: str
    two: str


def written_calls(render: Render) -> WrittenCalls | None:
    """Render conversations with and without calls. Returns None if the calls are not in the text."""
    plain, worded = (_render(render, words=words) for words in ("", _WORDS))
    prompt, _, behind = worded.partition(_WORDS)  # the text before and after an answer
    if plain.startswith(prompt):
        behind = plain[len(prompt) :]
    texts = []
    for count in (1, 2):
        called = _render(render, count=count)
        texts.append(called[_answer_start(called, prompt) :].removesuffix(behind))
        if not worded or _NAME not in texts[-1]:
            return None
    return WrittenCalls(*texts)


def derive_form(written: WrittenCalls) -> DerivedForm | None:
    """Derive the form from one rendered call. Returns None if there is no mark before it, or its arguments are not
    JSON."""
    arguments = _ARGUMENTS.search(written.one)
    if arguments is None:
        return None
    before, behind = written.one[: arguments.start()], written.one[arguments.end() :]
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


def reads(reader: Callable[[], PartReader], written: WrittenCalls, *, after_words: bool = False) -> bool:
    """Return whether a reader finds the calls that the template rendered, and no text before them.

    With `after_words` there may be such text: some templates close the reasoning or the prompt before calls only.
    """
    for text, count in ((written.one, 1), (written.two, 2)):
        answer = reader()
        parts = [*answer.push(text), *answer.finish()]
        names = [part.name for part in parts if isinstance(part, CallBegun)]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        written_names = min(count, text.count(_NAME))  # a template may render only the first call
        if names != [_NAME] * written_names or len(_ARGUMENTS.findall(arguments)) != written_names:
            return False
        if not after_words and any(isinstance(part, Said) for part in parts[:1]):
            return False
    return True


def _form(start: str, end: str, middle: str, name_key: str = "", arguments_key: str = "") -> DerivedForm | None:
    """Make the form without white space, which models write freely, and without list brackets, which every reader
    accepts. Returns None if the start mark is too short."""
    start, end = start.strip().removesuffix("[").rstrip(), end.strip().removeprefix("]").lstrip()
    tag = _TAG.match(end)  # text after the first tag ends the answer, not the call
    end = tag.group() if tag is not None else end.partition("\n")[0]
    return DerivedForm(start, end, middle, name_key, arguments_key) if len(start) >= _MIN_MARK else None


def _render(render: Render, *, words: str = "", count: int = 0) -> str:
    answer: dict[str, Any] = {"role": "assistant", "content": words}
    if count:
        answer["tool_calls"] = [
            {"id": f"abcdefgh{place}", "type": "function", "function": {"name": _NAME, "arguments": given}}
            for place, given in enumerate(({_KEY: _VALUE}, {_KEY: _OTHER})[:count])
        ]
    try:
        return render([{"role": "user", "content": "?"}, answer])
    except InvalidRequest:
        return ""


def _answer_start(called: str, prompt: str) -> int:
    """Return where an answer begins in a conversation: after the prompt, or where the text first differs from the
    prompt."""
    shared = _shared_prefix(called, prompt)
    while 0 < shared < len(prompt) and called[shared - 1] not in " \t\r\n>":
        shared -= 1
    return shared


def _shared_prefix(first: str, second: str) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


class DerivedReader(ObjectReader):
    """Reads calls of a derived form, with any white space around its marks."""

    _form: DerivedForm

    def _read_calls(self, mark: str) -> Reading[bool]:
        if self._form.name_key:
            return (yield from super()._read_calls(mark))
        if not (yield from self._read_named(self._form.middle.strip())):
            return False
        if self.end:
            yield from self._skip_space()
            yield from self._accept(self.end)
        return True

    def _read_named(self, middle: str) -> Reading[bool]:
        yield from self._skip_space()
        name = (yield from self._take_until(middle or "{", most=_NAME_CHARACTERS)).strip()
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
