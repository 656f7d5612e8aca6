"""Detects that an answer repeats itself."""

from __future__ import annotations

from quire.types.sampling import RepetitionDetection

REPEATED = "repetition_detected"  # the stop_reason in the response


class RepetitionWatch:
    """Takes an answer's tokens one by one. A token costs one comparison per pattern size, for answers of any length.

    For each pattern size, `_matches` counts how many of the last tokens equal the token one pattern earlier.
    """

    def __init__(self, rule: RepetitionDetection) -> None:
        self._rule = rule
        self._tokens: list[int] = []
        self._matches = [0] * (rule.max_pattern_size - rule.min_pattern_size + 1)  # last tokens that repeat

    def push(self, token_id: int) -> bool:
        """Add a token. Returns whether the answer now ends with a pattern that is repeated `min_count` times in a
        row."""
        rule, tokens, matches = self._rule, self._tokens, self._matches
        place = len(tokens)
        tokens.append(token_id)
        found = False
        for size in range(rule.min_pattern_size, min(rule.max_pattern_size, place) + 1):
            index = size - rule.min_pattern_size
            matches[index] = matches[index] + 1 if tokens[place - size] == token_id else 0
            found |= matches[index] >= size * (rule.min_count - 1)
        return found
