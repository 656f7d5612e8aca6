"""Priority scheduling with ageing: requests with a smaller priority value go first, but none waits for ever."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy


class ByPriority(Policy):
    """Every `ageing` seconds of waiting lower the priority value of a request by one.

    All requests age equally, so the order of two never changes. Bound: a request whose value is lower by d goes before
    another only if it arrives within d x `ageing` seconds after it.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def key(self, group: Group) -> Key:
        return (group.request.priority + group.arrival / self._ageing, group.ordinal)

    def overtakes(self, waiting: Group, running: Group) -> bool:
        return self.key(waiting) < self.key(running)
