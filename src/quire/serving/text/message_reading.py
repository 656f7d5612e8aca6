"""How the text of one chat answer is read: reasoning first, then words and calls."""

from __future__ import annotations

from dataclasses import dataclass

from quire.serving.text.parts import Part, PartReader, PlainReader, Thought
from quire.serving.text.reasoning import ReasoningFormat, ReasoningReader
from quire.serving.text.tool_calls.formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReading:
    """What the answers to one request may hold besides words."""

    tools: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False  # the prompt opened the reasoning
    shows_reasoning: bool = True

    def reader(self) -> MessageReader:
        """For one answer."""
        return MessageReader(self)


class MessageReader:
    """Reads one answer and counts the tokens of its reasoning."""

    def __init__(self, reading: MessageReading) -> None:
        words: PartReader = PlainReader()
        if reading.tools is not None:
            words = reading.tools.reader(reading.tool_names, reading.max_calls)
        self._reasoning: ReasoningReader | None = None
        if reading.reasoning is not None:
            words = self._reasoning = ReasoningReader(reading.reasoning, words, inside=reading.begins_inside)
        self._reader, self._shows_reasoning = words, reading.shows_reasoning
        self._num_undecided = 0
        self.num_reasoning_tokens = 0

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
