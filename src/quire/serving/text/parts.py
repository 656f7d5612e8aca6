"""The parts of an answer: visible text, reasoning and tool calls, and the protocol of readers that separate them while
text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is shown to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a tool call. Its arguments follow."""

    index: int  # among the answer's calls
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: JSON text, as the model writes it."""

    index: int
    text: str


Part: TypeAlias = Said | Thought | CallBegun | CallArguments


class PartReader(Protocol):
    """Parses one answer. The concatenated parts do not depend on how the text is cut into pieces."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are complete after `text`."""

    def finish(self) -> list[Part]:
        """Return the parts that were still held back. Called once, at the end."""


class PlainReader:
    """Returns all text as `Said`."""

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def held_back(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0 and not marker.startswith(text[place:]):
        place = text.find(marker[0], place + 1)
    return len(text) - place if place >= 0 else 0
