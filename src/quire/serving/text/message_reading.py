"""Parses the text of a chat answer into reasoning, visible text and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from quire.serving.text.parts import Part, PartReader, PlainReader, Thought
from quire.serving.text.reasoning import ReasoningFormat, ReasoningReader
from quire.serving.text.tool_calls.call_reader import AnswerReader, Parameters
from quire.serving.text.tool_calls.formats import HARMONY, ToolFormat, tool_format_named
from quire.serving.text.tool_calls.harmony import HarmonyReader

REPEATED_CALL = "repeated_call"  # the stop_reason in the response


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReading:
    """How to parse the answers to one request: formats of tools and reasoning, and what is allowed."""

    tools: ToolFormat | None = None
    parameters: Parameters = field(default_factory=dict)  # JSON schemas of the tools' parameters, by tool name
    max_calls: int | None = None
    must_call: bool = False  # the answer consists of calls: an incomplete mark is not shown as text
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False  # the prompt has opened the reasoning
    shows_reasoning: bool = True

    def reader(self) -> MessageReader:
        """Return a reader for one answer."""
        return MessageReader(self)

    def watch_maker(self) -> Callable[[], RepeatedCallWatch] | None:
        """Return a factory of watches that end an answer when it repeats a call. Returns None unless the answer must
        consist of several calls."""
        return partial(RepeatedCallWatch, self) if self.must_call and self.max_calls != 1 else None


class MessageReader:
    """Parses one answer and counts the tokens of its reasoning."""

    def __init__(self, reading: MessageReading) -> None:
        words: PartReader = PlainReader()
        self._calls: AnswerReader | None = None
        if reading.tools is not None:
            words = self._calls = reading.tools.reader(
                reading.parameters, reading.max_calls, must_call=reading.must_call
            )
        self._reasoning: ReasoningReader | HarmonyReader | None = None
        if isinstance(words, HarmonyReader) or (reading.reasoning is not None and reading.reasoning.name == HARMONY):
            words = self._reasoning = self._calls = _harmony_reader(reading)
        elif reading.reasoning is not None:
            words = self._reasoning = ReasoningReader(reading.reasoning, words, inside=reading.begins_inside)
        self._reader, self._shows_reasoning = words, reading.shows_reasoning
        self._num_undecided = 0
        self.num_reasoning_tokens = 0

    @property
    def repeats_call(self) -> bool:
        """Whether the answer has repeated one of its calls."""
        return self._calls is not None and self._calls.repeats_call

    def push(self, text: str, num_tokens: int = 0) -> list[Part]:
        """Return the parts that are complete after `text`, which is `num_tokens` tokens."""
        if self._reasoning is not None and self._reasoning.is_reading:
            self._num_undecided += num_tokens
        parts = self._shown(self._reader.push(text))
        if self._reasoning is not None and self._num_undecided and not self._reasoning.is_undecided:
            if self._reasoning.has_reasoning:
                self.num_reasoning_tokens += self._num_undecided
            self._num_undecided = 0
        return parts

    def finish(self) -> list[Part]:
        return self._shown(self._reader.finish())

    def _shown(self, parts: list[Part]) -> list[Part]:
        return parts if self._shows_reasoning else [part for part in parts if not isinstance(part, Thought)]


class RepeatedCallWatch:
    """Ends an answer of calls when it repeats one of them, since a small model may repeat it until its last token."""

    def __init__(self, reading: MessageReading) -> None:
        self._reader = reading.reader()

    def push(self, text: str) -> str | None:
        self._reader.push(text)
        return REPEATED_CALL if self._reader.repeats_call else None


def _harmony_reader(reading: MessageReading) -> HarmonyReader:
    """Return the single reader for reasoning, text and calls in harmony's channels."""
    form = tool_format_named(HARMONY)
    book = form.book(reading.parameters, reading.max_calls, must_call=reading.must_call)
    return HarmonyReader(book, reading.parameters, has_tools=reading.tools is not None)
