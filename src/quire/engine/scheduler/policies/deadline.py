"""Earliest deadline first: requests are admitted in the order of the deadlines of their first tokens, and a target time
per token bounds the size of steps."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy, SchedulerView
from quire.engine.scheduler.step_time import StepCurve

_LEAST_SHARE = 32  # at least 1 / _LEAST_SHARE of a full step's budget is for prompts, however late the decodes are
_AIM = 0.9  # of the target, because step times vary for steps of the same size


class ByDeadline(Policy):
    """A first token is due `ttft` seconds after arrival, plus `ttft_per_token` seconds for each token of the prompt.

    While any sequence decodes, a step computes no more tokens than are expected to take `tpot` seconds, by the measured
    times of steps of each size. Bound: no request waits for ever, because only requests that arrive before its deadline
    can have an earlier deadline and overtake it.
    """

    def __init__(self, ttft: float, ttft_per_token: float, tpot: float) -> None:
        self._ttft, self._ttft_per_token, self._tpot = ttft, ttft_per_token, tpot
        self._curve = StepCurve()

    def key(self, group: Group) -> Key:
        return (group.arrival + self._ttft + self._ttft_per_token * group.num_prompt, group.ordinal)

    def overtakes(self, waiting: Group, running: Group) -> bool:
        return self.key(waiting) < self.key(running)

    def budget(self, limit: int, view: SchedulerView) -> int:
        decoding = view.num_decoding
        if not decoding:
            return limit
        least = decoding + max(limit // _LEAST_SHARE, 1)
        return min(limit, max(least, self._curve.tokens_within(_AIM * self._tpot, limit)))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._curve.note(num_tokens, seconds)
