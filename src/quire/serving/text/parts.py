"""What the text of an answer is made of: words, thoughts and calls of tools. Readers tell them apart as text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Said:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. Its arguments follow."""

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
    """Reads one answer. However its text is cut into pieces, the parts joined are the same."""

    def push(self, text: str) -> list[Part]:
        """What became certain with `text`."""

    def finish(self) -> list[Part]:
        """What was still held back. Called once, at the end."""


class PlainReader:
    """Every word is for the user."""

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0 and not marker.startswith(text[place:]):
        place = text.find(marker[0], place + 1)
    return len(text) - place if place >= 0 else 0
