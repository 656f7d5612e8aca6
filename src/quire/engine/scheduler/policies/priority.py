"""By the request's priority, smaller first, but nobody waits for ever: who waits ages."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy


class ByPriority(Policy):
    """Every `ageing` seconds of waiting count as much as a priority lower by one.

    All age alike, so the order of two never changes. Bound: of those with a priority lower by d, only who comes within
    d x `ageing` seconds of a request goes before it.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def key(self, group: Group) -> Key:
        return (group.request.priority + group.arrival / self._ageing, group.ordinal)

    def goes_before(self, waiting: Group, running: Group) -> bool:
        return self.key(waiting) < self.key(running)
