"""First come, first served: by order of arrival alone, also after a preemption."""

from __future__ import annotations

from quire.engine.decoding.group import Group


def first_come_first_served(group: Group) -> tuple[int, ...]:
    return (group.ordinal,)
