"""The best of those at the head of the queue goes first, but nobody is overtaken too often."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, View


class Overtaking(Policy, ABC):
    """Compares the first `window` that wait and are ready. Bound: at most `max_overtakes` requests that came later are
    admitted before one that is ready.

    A group for which the bound is reached goes next. A choice stands until it is admitted, deferred or gone.
    """

    def __init__(self, window: int, max_overtakes: int) -> None:
        self._window, self._max_overtakes = window, max_overtakes
        self._overtaken: dict[Group, int] = {}  # those that wait and were passed by
        self._chosen: Group | None = None

    @abstractmethod
    def score(self, group: Group, view: View) -> float:
        """Smaller goes first; equals in order of arrival."""

    def choose(self, view: View) -> Group | None:
        head = view.waiting.head(self._window)
        for group in head:
            if self._overtaken.get(group, 0) >= self._max_overtakes:
                return group
        if self._chosen is None and head:
            self._chosen = min(head, key=lambda group: self.score(group, view))
        return self._chosen

    def soon(self, view: View, count: int) -> list[Group]:
        best = sorted(view.waiting.head(self._window), key=lambda group: self.score(group, view))
        if self._chosen is not None:  # others that were resumed may have pushed it out of the window
            best = [self._chosen, *(group for group in best if group is not self._chosen)]
        return best[:count]

    def admitted(self, group: Group, view: View) -> None:
        self._forget(group)
        for other in view.waiting.head(self._window):  # whoever is chosen was one of these
            if other.ordinal > group.ordinal:
                break
            self._overtaken[other] = self._overtaken.get(other, 0) + 1

    def deferred(self, group: Group) -> None:
        self._chosen = None if group is self._chosen else self._chosen

    def left(self, group: Group, view: View) -> None:  # noqa: ARG002 - Policy's signature
        self._forget(group)

    def _forget(self, group: Group) -> None:
        self._overtaken.pop(group, None)
        self._chosen = None if group is self._chosen else self._chosen
