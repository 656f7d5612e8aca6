"""The "harmony" format of gpt-oss: messages in channels. One reader handles reasoning, text and calls.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`, and `<|channel|>final<|message|>...<|return|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from quire.serving.text.lark import LarkGrammar
from quire.serving.text.parts import Part, Said, Thought
from quire.serving.text.tool_calls.call_book import CallBook
from quire.serving.text.tool_calls.call_reader import MIN_MARK, AnswerReader, CutShort, Parameters, Reading
from quire.serving.text.tool_calls.shape import CallShape, Function, arguments_rule

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"  # precedes each message except the first
_CALL_HEAD = f"{CHANNEL}commentary to=functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")


def _write_call(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
    head = f"{function['name']} {CONSTRAIN}json{MESSAGE}"
    return f"{lark.fixed(head)} {arguments_rule(function)}"


SHAPE = CallShape(_write_call, mark=_CALL_HEAD, most=1, words_mark=FINAL)  # a call ends the answer


class HarmonyReader(AnswerReader):
    """Reads whole answers. With `has_tools` False, messages to functions are shown as text."""

    def __init__(self, book: CallBook, parameters: Parameters | None = None, *, has_tools: bool = True) -> None:
        super().__init__(book, parameters)
        self._has_tools = has_tools
        self._state: Literal["start", "analysis", "other"] = "start"
        self.has_reasoning = False

    @property
    def is_reading(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._state != "other"

    @property
    def is_undecided(self) -> bool:
        """Whether it is not yet known if the answer has reasoning."""
        return self._state == "start"

    def _read(self) -> Reading[None]:
        try:
            first = yield from self._accept(CHANNEL, START, " to=")
            if not first:
                self._state = "other"
                yield from self._pass_words(self._say)
                return
            head = "" if first == START else first
            while True:
                head += yield from self._take_until(MESSAGE)
                yield from self._read_message(head)
                head = "" if self._ended_by in (START, END, CALL, RETURN) else self._ended_by
        except CutShort:
            return

    def _read_message(self, head: str) -> Reading[None]:
        recipient = _RECIPIENT.search(head)
        channel = head.partition(CHANNEL)[2].split()[:1]
        if recipient is not None and self._has_tools:
            self._state = "other"
            yield from self._read_call(recipient.group(1).removeprefix("functions."))
        elif channel == ["analysis"] and recipient is None:
            self._state, self.has_reasoning = "analysis", True
            yield from self._pass_words(self._think)
            self._state = "other"
        else:
            self._state = "other"
            yield from self._pass_words(self._say)

    def _read_call(self, name: str) -> Reading[None]:
        self._begin_call(name)
        count = 0

        def add(text: str) -> None:
            nonlocal count
            text = text.lstrip() if count == 0 else text
            count += len(text)
            self._add_arguments(text)

        yield from self._pass_until(add, *MARKS)
        if not count:
            self._add_arguments("{}")
        self._end_call()

    def _pass_words(self, emit: Callable[[str], None]) -> Reading[None]:
        try:
            yield from self._pass_until(emit, *MARKS)
        except CutShort:
            if len(self._buffer) < MIN_MARK:
                emit(self._buffer)
            raise

    def _say(self, text: str) -> None:
        self._add(Said(text))

    def _think(self, text: str) -> None:
        self._add(Thought(text))

    def _add(self, part: Said | Thought) -> None:
        if part.text:
            self._parts.append(part)

    def finish(self) -> list[Part]:
        parts = super().finish()
        self._buffer = ""
        return parts
