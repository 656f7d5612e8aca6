"""First come, first served: by order of arrival alone, also after a preemption."""

from __future__ import annotations

from quire.engine.scheduler.policies.base import Policy


class FirstCome(Policy):
    """Nobody is overtaken."""
