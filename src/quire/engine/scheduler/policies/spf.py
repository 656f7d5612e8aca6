"""Shortest prompt first."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import SchedulerView
from quire.engine.scheduler.policies.overtaking import Overtaking


class ShortestPrompt(Overtaking):
    """Admits the shortest prompt first, which gives the smallest mean time to the first token."""

    def score(self, group: Group, view: SchedulerView) -> float:  # noqa: ARG002 - Overtaking's signature
        return group.num_prompt
