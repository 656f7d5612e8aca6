"""Longest prefix match: whoever finds most of its tokens in the prefix cache goes first."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import View
from quire.engine.scheduler.policies.overtaking import Overtaking


class LongestPrefix(Overtaking):
    """Prompts that begin alike are computed one after the other, while what they share is in memory."""

    def score(self, group: Group, view: View) -> float:
        return -view.num_cached(group)
