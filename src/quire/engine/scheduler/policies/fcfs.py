"""First come, first served: in order of arrival, also after a preemption."""

from __future__ import annotations

from quire.engine.scheduler.policies.base import Policy


class FirstCome(Policy):
    """The default policy. No ready group is overtaken; only deferred groups are."""
