"""Finds the first stop string in a text that arrives in pieces, and ends the text there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quire.types.errors import InvalidRequest

MAX_STOP_CHARACTERS = 16_384


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A completed stop string: `text` is the last text to output, `stop` the stop string."""

    text: str
    stop: str


class StopStrings:
    """Finds the stop string that is completed first (of several completed at the same character, the longest).

    Text that may be the beginning of a stop string is held back until it cannot be one.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._machine = _machine(tuple(stops))
        self._include = include_in_output
        self._state = 0
        self._held = ""
        self._match: StopMatch | None = None

    def push(self, text: str) -> str | StopMatch:
        """Return the text that can be output now, or the match that ends the text. After a match, every call returns
        the match with empty text."""
        if self._match is not None:
            return StopMatch("", self._match.stop)
        text, start = self._held + text, len(self._held)
        state, machine = self._state, self._machine
        for place in range(start, len(text)):
            state = machine.next_state(state, text[place])
            stop = machine.completed[state]
            if stop is not None:
                end = place + 1
                self._held = ""
                self._match = StopMatch(text[: end if self._include else end - len(stop)], stop)
                return self._match
        self._state = state
        safe = len(text) - machine.depth[state]
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text that is still held back. Called when the text ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Machine:
    """An Aho-Corasick automaton. A state is the longest suffix of the text that is a prefix of some stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]  # length of the prefix that the state stands for
        self.completed: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._add(stop)
        self._link()

    def next_state(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.completed.append(None)
            state = self._next[state][character]
        self.completed[state] = stop

    def _link(self) -> None:
        """Compute the fallback states breadth first, so that a state's shorter fallback is complete before it is
        used."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.next_state(self._fallback[state], character)
                self.completed[child] = self.completed[child] or self.completed[self._fallback[child]]
                waiting.append(child)


@lru_cache(maxsize=16)
def _machine(stops: tuple[str, ...]) -> _Machine:
    if not all(stops):
        raise InvalidRequest("stop", "must hold non-empty strings", "leave empty ones out")
    size = sum(map(len, stops))
    if size > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            "stop", f"has {size} characters in all, limit {MAX_STOP_CHARACTERS}", "send fewer or shorter ones"
        )
    return _Machine(stops)
