"""Shortest prompt first."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import View
from quire.engine.scheduler.policies.overtaking import Overtaking


class ShortestPrompt(Overtaking):
    """The mean time to a first token is least when those that take longest go last."""

    def score(self, group: Group, view: View) -> float:  # noqa: ARG002 - Overtaking's signature
        return group.num_prompt
