"""Those that wait come in together: decodes pause while their prompts are computed."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, View


class WaitingServedRatio(Policy):
    """Opens when waiting / running exceeds `ratio`, or when nobody was let in for `max_waiting_tokens` decode steps.

    Then all that wait come in, as far as they fit. In between, steps only decode. Bound: who waits is looked at after
    `max_waiting_tokens` steps at the latest, and decodes pause no longer than the prompts of as many as fit take.
    """

    def __init__(self, ratio: float, max_waiting_tokens: int) -> None:
        self._ratio, self._max_waiting_tokens = ratio, max_waiting_tokens
        self._last_let_in = -1  # the latest of those that may come in now
        self._is_flowing = False  # the step before let somebody in
        self._admitted_tick = 0

    def pauses(self, view: View) -> bool:
        waiting, running, last = len(view.waiting), len(view.running), view.waiting.last()
        overdue = view.tick - self._admitted_tick >= self._max_waiting_tokens
        if last is not None and (not running or overdue or waiting > self._ratio * running):
            self._last_let_in = last.ordinal
        elif not self._is_flowing:
            self._last_let_in = -1
        self._is_flowing = False
        return view.is_prefilling or self.choose(view) is not None

    def choose(self, view: View) -> Group | None:
        first = view.waiting.first()
        return first if first is not None and first.ordinal <= self._last_let_in else None

    def admitted(self, group: Group, view: View) -> None:  # noqa: ARG002 - Policy's signature
        self._is_flowing, self._admitted_tick = True, view.tick
