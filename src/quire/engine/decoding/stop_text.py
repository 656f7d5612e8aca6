"""Stop strings found by the engine itself: in samples that are ranked, whose text nobody reads before the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import SamplingParams, TokenRules

_NO_TEXT = b""


@dataclass(frozen=True, slots=True)
class StopRules:
    """A request's stop strings as bytes, and what its tokens add to a text. Looked for only after `min_tokens`."""

    stops: tuple[tuple[bytes, str], ...]
    tokens: Sequence[bytes]
    silent_ids: frozenset[int]
    min_tokens: int

    @classmethod
    def of(cls, sampling: SamplingParams, rules: TokenRules, vocabulary: Vocabulary) -> StopRules:
        silent = set() if sampling.include_stop_str_in_output else set(rules.end_ids)
        if sampling.skip_special_tokens:
            silent |= vocabulary.special_ids
        stops = tuple((stop.encode("utf-8", "surrogatepass"), stop) for stop in sampling.stops)
        return cls(stops, vocabulary.tokens, frozenset(silent), sampling.min_tokens)

    @property
    def longest(self) -> int:
        return max(len(stop) for stop, _ in self.stops)

    def text_of(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) and token not in self.silent_ids else _NO_TEXT


@dataclass(frozen=True, slots=True)
class StopText:
    """The end of one sequence's text, as far as a stop string may reach back into it. Immutable: forks share it."""

    rules: StopRules
    tail: bytes = _NO_TEXT
    num_tokens: int = 0

    def push(self, token: int) -> tuple[StopText, str | None]:
        """The text one token further, and the stop string that this completed: the first, of several the longest."""
        rules, count = self.rules, self.num_tokens + 1
        if count <= rules.min_tokens:
            return StopText(rules, _NO_TEXT, count), None
        text = self.tail + rules.text_of(token)
        ends = [(place + len(stop), -len(stop), name) for stop, name in rules.stops if (place := text.find(stop)) >= 0]
        tail = text[max(len(text) - rules.longest + 1, 0) :]
        return StopText(rules, tail, count), min(ends)[2] if ends else None
