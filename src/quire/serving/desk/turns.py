"""Whose turn it is among those that wait at the edge, as the engine's policy has it inside."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.config.policy import DEFAULT_AGEING
from quire.serving.desk.ticket import Ticket


class Turns:
    """Gives every ticket a key, smaller first: its priority, less one for every `ageing` seconds it has waited. What is
    to stay resident goes before all: it is operators who ask for it, and others find it then.

    With `by_tenant`, tenants take turns instead, by prompt tokens (start-time fair queueing): what one sends at once
    stands behind what it sent before, not before what another sends later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ageing, self.by_tenant = DEFAULT_AGEING, False
        self._clock = clock
        self._reached = 0.0  # the key of the last that went in its turn
        self._ends: dict[str, float] = {}  # by tenant: where its next ticket stands, if that is not reached yet

    def key(self, ticket: Ticket) -> float:
        if ticket.submit.pin:
            return -math.inf
        if not self.by_tenant:
            return ticket.submit.priority + self._clock() / self.ageing
        tenant = ticket.submit.tenant
        start = max(self._reached, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + ticket.weight
        return start

    def reach(self, key: float) -> None:
        """The first in line went."""
        self._reached = max(self._reached, key)

    def forget(self) -> None:
        """Nobody waits: all begin anew."""
        self._reached = 0.0
        self._ends.clear()
