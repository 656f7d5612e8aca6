"""Priority scheduling with ageing: the request with the smallest priority value is first, and waiting lowers the value,
so that no request waits for ever."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy


class ByPriority(Policy):
    """Waiting for `ageing` seconds lowers the priority value of a request by one.

    All requests age at the same rate, so the order of two requests never changes. Bound: a request whose value is lower
    by d overtakes another one only if it arrives less than d x `ageing` seconds after it.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def key(self, group: Group) -> Key:
        return (group.request.priority + group.arrival / self._ageing, group.ordinal)

    def overtakes(self, waiting: Group, running: Group) -> bool:
        return self.key(waiting) < self.key(running)
