"""Separates the reasoning in an answer from its visible text by the marks of the model's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.serving.text.parts import Part, PartReader, Thought, held_back
from quire.serving.text.tool_calls import harmony


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning. With `is_implied`, answers begin inside reasoning even if no start mark
    precedes them.

    `before_next` is the text between the end of the reasoning and the next message, `before_words` the text before the
    visible text.
    """

    name: str
    start: str
    end: str
    is_implied: bool = False
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    before_next: str = ""
    before_words: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *filter(None, (self.before_next, self.before_words)))

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, *self.other_starts)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.other_ends)

    def begins_inside(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether an answer to `prompt` begins with reasoning that is already open.

        With `continues`, the prompt ends in the middle of a message.
        """
        if continues:
            return prompt.rfind(self.start) > prompt.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.start) or (self.is_implied and not ending.endswith(self.end))


_FORMATS = {
    "deepseek_r1": ReasoningFormat("deepseek_r1", "<think>", "</think>", is_implied=True),
    "qwen3": ReasoningFormat("qwen3", "<think>", "</think>"),
    "mistral": ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    "granite": ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        other_starts=("Here's my thought process:",),
        other_ends=("Here's my response:",),
    ),
    "harmony": ReasoningFormat(
        "harmony", harmony.ANALYSIS, harmony.END, before_next=harmony.NEXT, before_words=harmony.FINAL
    ),
}


def reasoning_format(parser: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of this name. For "auto", return the format whose marks the chat template contains. Returns
    None if there is none."""
    if parser != "auto":
        return _FORMATS.get(parser)
    if template is None:
        return None
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return _FORMATS["harmony"]
    for name in ("qwen3", "mistral", "granite"):
        if _FORMATS[name].end in template:
            return _FORMATS[name]
    return None


def reasoning_format_named(name: str) -> ReasoningFormat:
    return _FORMATS[name]


class ReasoningReader:
    """Returns text up to the end mark as `Thought`, and lets `then` parse the rest.

    An answer has no reasoning unless it begins with the start mark or begins `inside`. White space around reasoning is
    dropped.
    """

    def __init__(self, form: ReasoningFormat, then: PartReader, *, inside: bool) -> None:
        self._form, self._then, self._inside = form, then, inside
        self._state: Literal["before", "thinking", "after", "saying"] = "before"
        self._buffer = ""
        self._has_thought = self._was_opened = False

    @property
    def is_reading(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._state in ("before", "thinking")

    @property
    def is_undecided(self) -> bool:
        """Whether it is not yet known if the answer has reasoning."""
        return self._state == "before"

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer has reasoning, even if it is empty."""
        return self._was_opened

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        if self._state == "before":
            self._look_for_start()
        if self._state == "thinking":
            self._think(parts)
        if self._state == "after" and (rest := self._buffer.lstrip()):
            self._buffer, self._state = rest, "saying"
        if self._state == "saying":
            rest, self._buffer = self._buffer, ""
            parts += self._then.push(rest)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state == "thinking" or (self._state == "before" and self._inside):
            self._add(self._buffer.strip() if not self._has_thought else self._buffer.rstrip(), parts)
        elif self._state == "before":
            parts += self._then.push(self._buffer)
        self._buffer = ""
        return parts + self._then.finish()

    def _look_for_start(self) -> None:
        """Consume the start mark, if the answer begins with one. Models may write it even if their prompt ends with
        it."""
        begun = self._buffer.lstrip()
        found = next((start for start in self._form.starts if begun.startswith(start)), None)
        if found is not None:
            self._buffer, self._state = begun[len(found) :], "thinking"
        elif not any(start.startswith(begun) for start in self._form.starts):
            self._state = "thinking" if self._inside else "saying"
        self._was_opened = self._state == "thinking"

    def _think(self, parts: list[Part]) -> None:
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
        found = [(place, end) for end in self._form.ends if (place := self._buffer.find(end)) >= 0]
        if found:
            place, end = min(found)
            self._add(self._buffer[:place].rstrip(), parts)
            self._buffer, self._state = self._buffer[place + len(end) :], "after"
            return
        held = max(held_back(self._buffer, end) for end in self._form.ends)
        certain = self._buffer[: len(self._buffer) - held].rstrip()
        self._add(certain, parts)
        self._buffer = self._buffer[len(certain) :]

    def _add(self, text: str, parts: list[Part]) -> None:
        if text:
            self._has_thought = True
            parts.append(Thought(text))
