"""The base class of policies that admit the group with the best score, with a bound on overtaking."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, SchedulerView


class Overtaking(Policy, ABC):
    """Admits the group with the smallest score among the first `window` ready groups. Bound: at most `max_overtakes`
    later requests are admitted before a group that is ready; then it is admitted next.

    A chosen group stays chosen until it is admitted, deferred or removed.
    """

    def __init__(self, window: int, max_overtakes: int) -> None:
        self._window, self._max_overtakes = window, max_overtakes
        self._overtaken: dict[Group, int] = {}  # waiting groups -> how often they were overtaken
        self._chosen: Group | None = None

    @abstractmethod
    def score(self, group: Group, view: SchedulerView) -> float:
        """Return the score of a group. The smallest is admitted first; equal ones in order of arrival."""

    def choose(self, view: SchedulerView) -> Group | None:
        head = view.waiting.head(self._window)
        for group in head:
            if self._overtaken.get(group, 0) >= self._max_overtakes:
                return group
        if self._chosen is None and head:
            self._chosen = min(head, key=lambda group: self.score(group, view))
        return self._chosen

    def likely_next(self, view: SchedulerView, count: int) -> list[Group]:
        best = sorted(view.waiting.head(self._window), key=lambda group: self.score(group, view))
        if self._chosen is not None:  # groups that were resumed may have pushed it out of the window
            best = [self._chosen, *(group for group in best if group is not self._chosen)]
        return best[:count]

    def admitted(self, group: Group, view: SchedulerView) -> None:
        self._forget(group)
        for other in view.waiting.head(self._window):  # the chosen group was one of these
            if other.ordinal > group.ordinal:
                break
            self._overtaken[other] = self._overtaken.get(other, 0) + 1

    def deferred(self, group: Group) -> None:
        self._chosen = None if group is self._chosen else self._chosen

    def removed(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        self._forget(group)

    def _forget(self, group: Group) -> None:
        self._overtaken.pop(group, None)
        self._chosen = None if group is self._chosen else self._chosen
