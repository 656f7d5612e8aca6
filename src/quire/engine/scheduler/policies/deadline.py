"""Whose first token is due earliest goes first, and prompts leave those that decode the time they were promised."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy, View
from quire.engine.scheduler.step_time import StepTime

_LEAST_SHARE = 8  # one in so many tokens of a full step are for prompts, however late the decodes are


class ByDeadline(Policy):
    """First tokens are due `ttft` seconds after arrival, and `ttft_per_token` later for each token of the prompt.

    While somebody decodes, a step computes no more tokens than are expected to take `tpot` seconds. Bound: a request is
    overtaken only by those that come before it is due.
    """

    def __init__(self, ttft: float, ttft_per_token: float, tpot: float) -> None:
        self._ttft, self._ttft_per_token, self._tpot = ttft, ttft_per_token, tpot
        self._step_time = StepTime()

    def key(self, group: Group) -> Key:
        return (group.arrival + self._ttft + self._ttft_per_token * group.num_prompt, group.ordinal)

    def goes_before(self, waiting: Group, running: Group) -> bool:
        return self.key(waiting) < self.key(running)

    def budget(self, limit: int, view: View) -> int:
        decoding = view.num_decoding
        if not decoding:
            return limit
        least = decoding + max(limit // _LEAST_SHARE, 1)
        return min(limit, max(least, self._step_time.tokens_within(self._tpot, limit)))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._step_time.note(num_tokens, seconds)
