"""The parts of a chat answer as OpenAI's JSON has them: in one message, or in the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.serving.text.message_reading import MessageReading
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought


def finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """Why an answer ended: one that came to its own end with calls ended to have them made."""
    return "tool_calls" if reason == "stop" and has_calls else reason


class MessageBuilder:
    """A whole message. `content` is null where the model said nothing but thought or called."""

    def __init__(self, reading: MessageReading) -> None:
        self._reader = reading.reader()
        self._parts: list[Part] = []

    def push(self, text: str, num_tokens: int = 0) -> None:
        self._parts += self._reader.push(text, num_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def build(self, preface: str) -> tuple[dict[str, Any], bool]:
        """The message, and whether it holds calls. The answer is over."""
        self._parts += self._reader.finish()
        said = preface + "".join(part.text for part in self._parts if isinstance(part, Said))
        thoughts = "".join(part.text for part in self._parts if isinstance(part, Thought))
        calls = _calls(self._parts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said if said or not (thoughts or calls) else None,
            "refusal": None,
        }
        if thoughts:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if calls:
            message["tool_calls"] = calls
        return message, bool(calls)


class DeltaMaker:
    """One streamed choice."""

    def __init__(self, reading: MessageReading) -> None:
        self._reader = reading.reader()
        self.has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def delta(self, pieces: Iterable[tuple[str, int]], *, is_last: bool) -> dict[str, Any]:
        """What new pieces of text, of so many tokens each, add to the message; empty while that is not certain."""
        parts = [part for text, num_tokens in pieces for part in self._reader.push(text, num_tokens)]
        if is_last:
            parts += self._reader.finish()
        made: dict[str, Any] = {}
        said = "".join(part.text for part in parts if isinstance(part, Said))
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        calls = _call_deltas(parts)
        if said:
            made["content"] = said
        if thoughts:
            made |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if calls:
            made["tool_calls"] = calls
            self.has_calls = True
        return made


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return list(calls.values())


def _call_deltas(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """One entry per call that is begun or goes on; the first of a call carries its id and name."""
    entries: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            entries[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            entry = entries.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
    return list(entries.values())
