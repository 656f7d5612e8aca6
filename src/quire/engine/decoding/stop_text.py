"""Stop strings of ranked samples (best_of, beam search), which the engine itself looks for. The serving layer finds
those of streamed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import SamplingParams, TokenRules

_NO_TEXT = b""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop strings of a request as bytes, and the bytes of each token. Stop strings count only after `min_tokens`
    tokens."""

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
    """The last bytes of a sequence's text, in which a stop string may have begun. Immutable: forks share it."""

    rules: StopRules
    tail: bytes = _NO_TEXT
    num_tokens: int = 0

    def push(self, token: int) -> tuple[StopText, str | None]:
        """Return the text after one more token, and the stop string that the token completed, or None. Of several stop
        strings it is the one that ends first; of these, the longest."""
        rules, count = self.rules, self.num_tokens + 1
        if count <= rules.min_tokens:
            return StopText(rules, _NO_TEXT, count), None
        text = self.tail + rules.text_of(token)
        ends = [(place + len(stop), -len(stop), name) for stop, name in rules.stops if (place := text.find(stop)) >= 0]
        tail = text[max(len(text) - rules.longest + 1, 0) :]
        return StopText(rules, tail, count), min(ends)[2] if ends else None
