"""Notices when an answer runs in circles."""

from __future__ import annotations

from quire.types.sampling import RepetitionDetection

REPEATED = "repetition_detected"  # the stop reason users are told


class RepetitionWatch:
    """Takes an answer's tokens one by one. A token costs one comparison per pattern size, however long the answer."""

    def __init__(self, rule: RepetitionDetection) -> None:
        self._rule = rule
        self._tokens: list[int] = []
        self._matches = [0] * (rule.max_pattern_size - rule.min_pattern_size + 1)  # tokens equal to those a size before

    def push(self, token_id: int) -> bool:
        """Whether the answer now ends with a pattern, often enough in a row."""
        rule, tokens, matches = self._rule, self._tokens, self._matches
        place = len(tokens)
        tokens.append(token_id)
        found = False
        for size in range(rule.min_pattern_size, min(rule.max_pattern_size, place) + 1):
            index = size - rule.min_pattern_size
            matches[index] = matches[index] + 1 if tokens[place - size] == token_id else 0
            found |= matches[index] >= size * (rule.min_count - 1)
        return found
