"""Admission in waves: waiting groups are admitted together, and decoding pauses while their prompts are computed."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, SchedulerView


class WaitingServedRatio(Policy):
    """A wave begins when waiting / running exceeds `ratio`, or when no group was admitted for `max_waiting_tokens`
    decode steps. Then all waiting groups that fit are admitted. Between waves, steps only decode.

    Bound: a waiting group is considered after at most `max_waiting_tokens` steps, and decoding pauses no longer than
    the prompts of one wave take.
    """

    def __init__(self, ratio: float, max_waiting_tokens: int) -> None:
        self._ratio, self._max_waiting_tokens = ratio, max_waiting_tokens
        self._last_in_wave = -1  # the ordinal of the last group in the current wave
        self._is_admitting = False  # the last step admitted a group
        self._admitted_tick = 0

    def pauses_decoding(self, view: SchedulerView) -> bool:
        waiting, running, last = len(view.waiting), len(view.running), view.waiting.last()
        overdue = view.tick - self._admitted_tick >= self._max_waiting_tokens
        if last is not None and (not running or overdue or waiting > self._ratio * running):
            self._last_in_wave = last.ordinal
        elif not self._is_admitting:
            self._last_in_wave = -1
        self._is_admitting = False
        return view.is_prefilling or self.choose(view) is not None

    def choose(self, view: SchedulerView) -> Group | None:
        first = view.waiting.first()
        return first if first is not None and first.ordinal <= self._last_in_wave else None

    def admitted(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        self._is_admitting, self._admitted_tick = True, view.tick
