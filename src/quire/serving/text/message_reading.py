"""How the text of one chat answer is read: reasoning first, then words and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from quire.serving.text.parts import Part, PartReader, PlainReader, Thought
from quire.serving.text.reasoning import ReasoningFormat, ReasoningReader
from quire.serving.text.tool_calls.call_reader import AnswerReader, Parameters
from quire.serving.text.tool_calls.formats import HARMONY, ToolFormat, tool_format_named
from quire.serving.text.tool_calls.harmony import HarmonyReader

REPEATED_CALL = "repeated_call"  # the stop reason users are told


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReading:
    """What the answers to one request may hold besides words."""

    tools: ToolFormat | None = None
    parameters: Parameters = field(default_factory=dict)  # of the tools, by name
    max_calls: int | None = None
    must_call: bool = False  # the answer is calls: the beginning of a mark is no word
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False  # the prompt opened the reasoning
    shows_reasoning: bool = True

    def reader(self) -> MessageReader:
        """For one answer."""
        return MessageReader(self)

    def watch_maker(self) -> Callable[[], RepeatedCallWatch] | None:
        """Return what ends an answer that must be calls and repeats itself; None: nothing has to."""
        return partial(RepeatedCallWatch, self) if self.must_call and self.max_calls != 1 else None


class MessageReader:
    """Reads one answer and counts the tokens of its reasoning."""

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
        """Whether the answer has made one of its calls again."""
        return self._calls is not None and self._calls.repeats_call

    def push(self, text: str, num_tokens: int = 0) -> list[Part]:
        """What became certain with the text of so many tokens."""
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
    """Ends an answer of calls where it makes one of them again. A small model would do so to its last token."""

    def __init__(self, reading: MessageReading) -> None:
        self._reader = reading.reader()

    def push(self, text: str) -> str | None:
        self._reader.push(text)
        return REPEATED_CALL if self._reader.repeats_call else None


def _harmony_reader(reading: MessageReading) -> HarmonyReader:
    """Return the one reader of reasoning, words and calls in harmony's channels."""
    form = tool_format_named(HARMONY)
    book = form.book(reading.parameters, reading.max_calls, must_call=reading.must_call)
    return HarmonyReader(book, reading.parameters, has_tools=reading.tools is not None)
