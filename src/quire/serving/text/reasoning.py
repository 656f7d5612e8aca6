"""Separates the reasoning in an answer from its visible text by the marks of the model's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.serving.text.parts import Part, PartReader, Thought, held_back
from quire.serving.text.tool_calls import gemma4, harmony


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks that a model writes around its reasoning and around its visible text."""

    name: str
    start: str
    end: str
    is_implied: bool = False  # answers begin with reasoning even without a start mark
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    before_next: str = ""  # between the end of the reasoning and the next message
    before_words: str = ""  # before the visible text
    label: str = ""  # the line after the start mark that names the channel
    kept_ends: tuple[str, ...] = ()  # marks that end the reasoning and belong to what follows
    is_repeated: bool = False  # there may be reasoning and end marks between parts of the visible text
    wrappers: tuple[str, ...] = ()  # removed from the visible text before the first of kept_ends or call_marks
    call_marks: tuple[str, ...] = ()  # the starts of tool calls

    @property
    def opening(self) -> str:
        """What a model writes before its thoughts."""
        return f"{self.start}{self.label}\n" if self.label else self.start

    @property
    def marks(self) -> tuple[str, ...]:
        others = (self.before_next, self.before_words, *self.wrappers)
        return (*self.starts, *self.ends, *filter(None, others))

    @property
    def marks_in_text(self) -> tuple[str, ...]:
        """The marks that are looked for in the visible text."""
        marks = (*self.starts, *self.ends) if self.is_repeated else ()
        return (*marks, *self.wrappers, *self.kept_ends, *self.call_marks) if marks or self.wrappers else ()

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
        return ending.endswith((self.start, self.start + self.label)) or (
            self.is_implied and not ending.endswith(self.end)
        )


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
    "gemma4": ReasoningFormat(
        "gemma4", "<|channel>", "<channel|>", label="thought", kept_ends=(gemma4.START,), is_repeated=True
    ),
    "seed_oss": ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    "cohere_command": ReasoningFormat(
        "cohere_command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        kept_ends=("<|START_ACTION|>",),
        wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "ernie45": ReasoningFormat(
        "ernie45",
        "<think>",
        "</think>",
        call_marks=("<tool_call>", "<|tool_call|>"),
        wrappers=("<response>", "</response>"),
    ),
    "hunyuan_a13b": ReasoningFormat(
        "hunyuan_a13b", "<think>", "</think>", call_marks=("<tool_calls>",), wrappers=("<answer>", "</answer>")
    ),
    "kimi_vl": ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷"),
    "apertus": ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    "harmony": ReasoningFormat(
        "harmony", harmony.ANALYSIS, harmony.END, before_next=harmony.NEXT, before_words=harmony.FINAL
    ),
}


# The first format whose mark is in a template is the template's.
_IN_TEMPLATES = (
    ("seed_oss", "seed:think>"),
    ("cohere_command", _FORMATS["cohere_command"].end),
    ("ernie45", "<response></response>"),  # Granite 3.3 names them so; other templates write tools' results so
    ("hunyuan_a13b", "</think>\\n<answer>"),
    *((name, _FORMATS[name].end) for name in ("qwen3", "mistral", "granite", "gemma4", "kimi_vl", "apertus")),
)


def reasoning_format(parser: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of this name. For "auto", return the format whose marks the chat template contains. Returns
    None if there is none."""
    if parser != "auto":
        return _FORMATS.get(parser)
    if template is None:
        return None
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return _FORMATS["harmony"]
    for name, mark in _IN_TEMPLATES:
        if mark in template:
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
        self._text_marks = form.marks_in_text  # until there is a call: its arguments are passed on as they are
        self._label = ""  # the name of the channel while it may still come, behind a start mark

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
        while True:
            if self._state == "thinking":
                self._think(parts)
            if self._state == "after" and (rest := self._buffer.lstrip()):
                self._buffer, self._state = rest, "saying"
            if self._state != "saying" or not self._say(parts):
                return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._label:
            self._buffer = "" if self._label.startswith(self._buffer) else self._buffer.removeprefix(self._label)
        if self._state == "thinking" or (self._state == "before" and self._inside):
            self._add(self._buffer.strip() if not self._has_thought else self._buffer.rstrip(), parts)
        elif self._state in ("before", "saying"):
            parts += self._then.push(self._buffer)
        self._buffer = ""
        return parts + self._then.finish()

    def _look_for_start(self) -> None:
        """Consume the start mark, if the answer begins with one. Models may write it even if their prompt ends with
        it."""
        begun = self._buffer.lstrip()
        found = next((start for start in self._form.starts if begun.startswith(start)), None)
        if found is not None:
            self._buffer, self._state, self._label = begun[len(found) :], "thinking", self._form.label
        elif not any(start.startswith(begun) for start in self._form.starts):
            self._state = "thinking" if self._inside else "saying"
        self._was_opened = self._state == "thinking"

    def _think(self, parts: list[Part]) -> None:
        if self._label and not self._drop_label():
            return
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
        ends = (*self._form.ends, *self._form.kept_ends)
        found = [(place, end) for end in ends if (place := self._buffer.find(end)) >= 0]
        if found:
            place, end = min(found)
            self._add(self._buffer[:place].rstrip(), parts)
            kept = end if end in self._form.kept_ends else ""
            self._buffer, self._state = kept + self._buffer[place + len(end) :], "after"
            return
        held = max(held_back(self._buffer, end) for end in ends)
        certain = self._buffer[: len(self._buffer) - held].rstrip()
        self._add(certain, parts)
        self._buffer = self._buffer[len(certain) :]

    def _say(self, parts: list[Part]) -> bool:
        """Pass on words up to the next mark. Returns whether there was one."""
        marks = self._text_marks
        found = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        place, mark = min(found, default=(len(self._buffer), ""))
        if not mark:
            place -= max((held_back(self._buffer, mark) for mark in marks), default=0)
        parts += self._then.push(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if mark in self._form.kept_ends or mark in self._form.call_marks:
            self._text_marks = ()
        elif mark:
            self._buffer = self._buffer[len(mark) :]
        if mark in self._form.wrappers:
            self._state = "after"
        if mark in self._form.starts:
            self._state, self._label, self._has_thought, self._was_opened = "thinking", self._form.label, False, True
        return bool(mark)

    def _drop_label(self) -> bool:
        """Drop the name of the channel. Returns False where more text must tell whether it stands there."""
        lines = [self._label + end for end in ("\n", *self._form.ends)]
        if any(self._buffer.startswith(line) for line in lines):
            self._buffer = self._buffer.removeprefix(self._label)
        elif any(line.startswith(self._buffer) for line in lines):
            return False
        self._label = ""
        return True

    def _add(self, text: str, parts: list[Part]) -> None:
        if text:
            self._has_thought = True
            parts.append(Thought(text))
