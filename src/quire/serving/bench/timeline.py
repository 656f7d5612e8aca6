"""What is recorded of one request: its bytes and when they arrived. They are parsed after the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class Recording:
    """Raw bytes with their arrival times. They are parsed later, so that parsing does not delay the next
    measurement."""

    planned_at: float
    sent_at: float = 0.0
    ended_at: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The measurements of one request. All times are seconds on the client's monotonic clock."""

    planned_at: float
    sent_at: float
    ended_at: float
    events: tuple[float, ...]  # times at which tokens arrived
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None

    def since(self, start: float) -> Timeline:
        """Return the same with times that count from `start`."""
        return replace(
            self,
            planned_at=self.planned_at - start,
            sent_at=self.sent_at - start,
            ended_at=self.ended_at - start,
            events=tuple(event - start for event in self.events),
        )

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent_at

    @property
    def latency(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token or one event."""
        following = self.num_output_tokens - 1
        return (self.events[-1] - self.events[0]) / following if following > 0 and len(self.events) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]


def read_recording(recording: Recording) -> Timeline:
    """Parse a recording. An answer without tokens, with an error event, or without an end is an error."""
    events: list[float] = []
    usage: dict[str, Any] = {}
    error, rest, num_tokens, is_done = recording.error, b"", 0, False
    for moment, data in recording.chunks:
        *lines, rest = (rest + data).split(b"\n")
        has_token = False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if line[5:].strip() == b"[DONE]":
                is_done = True
                continue
            event = _decode(line[5:])
            if event is None or "error" in event:
                error = error or _said(event)
                continue
            usage = event.get("usage") or usage
            tokens = [choice for choice in event.get("choices") or () if _has_token(choice)]
            num_tokens += len(tokens)
            has_token = has_token or bool(tokens)
        if has_token:
            events.append(moment)
    if error is None and not events:
        error = "the answer held no token"
    if error is None and not is_done:
        error = "the answer was cut short"
    return Timeline(
        planned_at=recording.planned_at,
        sent_at=recording.sent_at,
        ended_at=recording.ended_at,
        events=tuple(events),
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_output_tokens=int(usage.get("completion_tokens") or num_tokens),
        error=error,
    )


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether the choice has a token, which may have empty text. A role or a finish reason alone is not a token."""
    is_last = choice.get("finish_reason") is not None
    if "delta" in choice:
        delta = choice["delta"] or {}
        content = delta.get("content")
        return bool(content or delta.get("reasoning_content")) or (
            content == "" and "role" not in delta and not is_last
        )
    return bool(choice.get("text")) or (choice.get("text") == "" and not is_last)


def _decode(data: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(data)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _said(event: dict[str, Any] | None) -> str:
    if event is None:
        return "an event is no JSON"
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
