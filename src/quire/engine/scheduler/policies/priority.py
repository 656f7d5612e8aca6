"""By the request's priority, smaller first; equals in order of arrival."""

from __future__ import annotations

from quire.engine.decoding.group import Group


def by_priority(group: Group) -> tuple[int, ...]:
    return (group.request.priority, group.ordinal)
