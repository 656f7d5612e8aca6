"""Longest prefix match: the group with the most cached tokens is admitted first."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import SchedulerView
from quire.engine.scheduler.policies.overtaking import Overtaking


class LongestPrefix(Overtaking):
    """Admits prompts with a common prefix one after the other, while the prefix is cached.

    Each group is looked up once per plan, however many groups the plan admits.
    """

    def __init__(self, window: int, max_overtakes: int) -> None:
        super().__init__(window, max_overtakes)
        self._plan, self._scores = -1, dict[Group, int]()

    def score(self, group: Group, view: SchedulerView) -> float:
        if self._plan != view.num_plans:
            self._plan, self._scores = view.num_plans, {}
        score = self._scores.get(group)
        if score is None:
            score = self._scores[group] = -view.num_cached(group)
        return score
