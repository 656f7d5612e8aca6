"""Scheduling policies by name. A policy maps a group to a key: unique, unchanging, smaller goes first."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.fcfs import first_come_first_served
from quire.engine.scheduler.policies.priority import by_priority
from quire.types.errors import ConfigError

Key = tuple[int, ...]
Policy = Callable[[Group], Key]

POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "priority": by_priority}


def find_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is not known", f"choose one of {', '.join(POLICIES)}")
    return POLICIES[name]
