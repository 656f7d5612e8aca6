"""Fairness among tenants: the tenant that was served least is admitted first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key, Policy, SchedulerView
from quire.engine.scheduler.queue import GroupQueue
from quire.types.step import Ints

_MANY_TENANTS = 1_024  # remembered tenants, above which idle ones are forgotten
_MANY_ENTRIES = 64  # entries of a heap, above which entries of former members are removed


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant that has waiting or running groups, or whose counter is still needed."""

    waiting: GroupQueue
    slot: int  # its index in arrays over tenants
    counter: float = 0.0  # the service it got, in weighted tokens; raised when it comes back from idle
    turn: int = 0  # grows each time the tenant begins to wait, so it is unique among waiting tenants
    num_running: int = 0


def _rank(tenant: _Tenant) -> tuple[float, int]:
    """Return the sort key of a waiting tenant: its counter; of equal counters, the tenant that began to wait first."""
    return tenant.counter, tenant.turn


class _TenantHeap:
    """Tenants in a heap by their rank, with lazy updates. `is_member` returns whether a tenant belongs in it.

    Ranks only grow, so the rank in an entry is at most its tenant's current rank. When an outdated entry gets to the
    top, `first` replaces it, or removes it if its tenant is no longer a member.
    """

    def __init__(self, is_member: Callable[[_Tenant], bool]) -> None:
        self._is_member = is_member
        self._entries: list[tuple[tuple[float, int], _Tenant]] = []  # one for each tenant in `_tenants`
        self._tenants: set[_Tenant] = set()
        self._max_entries = _MANY_ENTRIES  # at this number of entries, those of former members are removed

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tenant: _Tenant) -> None:
        """Add a tenant that has become a member. Idempotent."""
        if tenant in self._tenants:
            return
        if len(self._entries) >= self._max_entries:
            self._remove_former_members()
        self._tenants.add(tenant)
        heappush(self._entries, (_rank(tenant), tenant))

    def first(self) -> _Tenant | None:
        """Return the member with the smallest rank."""
        entries = self._entries
        while entries:
            rank, tenant = entries[0]
            if not self._is_member(tenant):
                heappop(entries)
                self._tenants.remove(tenant)
            elif rank != (current := _rank(tenant)):
                heapreplace(entries, (current, tenant))
            else:
                return tenant
        return None

    def head(self, count: int) -> list[_Tenant]:
        """Return the `count` members with the smallest ranks."""
        members: list[_Tenant] = []
        while len(members) < count and (tenant := self.first()) is not None:
            heappop(self._entries)
            members.append(tenant)
        for tenant in members:
            heappush(self._entries, (_rank(tenant), tenant))
        return members

    def _remove_former_members(self) -> None:
        self._entries = [entry for entry in self._entries if self._is_member(entry[1])]
        heapify(self._entries)
        self._tenants = {tenant for _, tenant in self._entries}
        self._max_entries = max(_MANY_ENTRIES, 2 * len(self._entries))


class Fair(Policy):
    """A virtual token counter per tenant (Sheng et al., OSDI 2024): the tenant with the smallest counter is admitted
    next.

    A prompt counts when it is admitted, an output token when its step's result comes. A tenant that comes back from
    idle starts at the smallest counter of the waiting tenants or above, so it gains nothing by idling. Bound: let U be
    the larger of input_weight x the longest prompt and output_weight x the cache's token slots. Counters of tenants
    that wait never differ by more than U: only the tenant with the smallest counter is admitted, which adds a prompt,
    and running requests add at most what fits into the cache. So the services of two tenants that always have waiting
    requests differ by at most 2 U, however many requests one of them sends.
    """

    counts_outputs = True

    def __init__(self, input_weight: float, output_weight: float, num_rows: int) -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: dict[str, _Tenant] = {}  # tenants with waiting groups
        self._by_rank = _TenantHeap(lambda tenant: len(tenant.waiting) > 0)
        self._ready_by_rank = _TenantHeap(lambda tenant: tenant.waiting.num_ready > 0)
        self._num_turns = 0
        self._num_remembered = _MANY_TENANTS  # at this number of tenants, idle ones are forgotten
        self._last_to_wait = _Tenant(GroupQueue(self.key), 0)  # the tenant whose last waiting group was removed last
        self._slots: list[_Tenant | None] = [None]  # the tenant of each slot; the first slot is unused
        self._free_slots: list[int] = []
        self._slot_of_row = np.zeros(num_rows, dtype=np.int64)
        self._outputs = np.zeros(1, dtype=np.int64)  # generated tokens by slot that are not added to the counters yet
        self._has_outputs = False  # whether there are any

    def counter(self, tenant: str) -> float:
        """Return the service that a tenant got, in weighted tokens."""
        self._charge()
        return self._tenants[tenant].counter if tenant in self._tenants else 0.0

    def choose(self, view: SchedulerView) -> Group | None:  # noqa: ARG002
        if len(self._backlogged) > 1:  # otherwise there is no choice
            self._charge()
        least = self._ready_by_rank.first()
        return None if least is None else least.waiting.first()

    def rank(self, group: Group) -> Key:
        self._charge()
        return (*_rank(self._tenants[group.request.tenant]), group.ordinal)

    def likely_next(self, view: SchedulerView, count: int) -> list[Group]:  # noqa: ARG002 - Policy's signature
        least = self._ready_by_rank.head(count)
        return [group for tenant in least for group in tenant.waiting.head(count // len(least))]

    def added(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        name = group.request.tenant
        if name not in self._tenants:
            self._forget_some()
            self._tenants[name] = self._new_tenant()
        tenant = self._tenants[name]
        if name not in self._backlogged:
            self._charge()
            tenant.counter = max(tenant.counter, self._floor())
            self._num_turns += 1
            tenant.turn = self._num_turns
            self._backlogged[name] = tenant
        tenant.waiting.add(group)
        self._by_rank.add(tenant)
        self._ready_by_rank.add(tenant)

    def deferred(self, group: Group) -> None:
        self._tenants[group.request.tenant].waiting.defer(group)

    def resumed(self, group: Group) -> None:
        tenant = self._tenants[group.request.tenant]
        tenant.waiting.resume(group)
        self._ready_by_rank.add(tenant)

    def admitted(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        tenant = self._dequeue(group)
        tenant.num_running += 1
        if not group.num_preemptions:  # a tenant does not pay for recomputing a preempted prompt
            tenant.counter += self._input_weight * group.num_prompt
        for sequence in group.live:
            assert sequence.row is not None
            self._slot_of_row[sequence.row] = tenant.slot

    def note_generated(self, rows: Ints) -> None:
        self._outputs += np.bincount(self._slot_of_row[rows], minlength=len(self._outputs))
        self._has_outputs = True

    def note_generated_paced(self, group: Group, num_tokens: int) -> None:
        self._outputs[self._tenants[group.request.tenant].slot] += num_tokens
        self._has_outputs = True

    def removed(self, group: Group, view: SchedulerView) -> None:  # noqa: ARG002 - Policy's signature
        if not group.is_running:
            self._dequeue(group)
            return
        self._tenants[group.request.tenant].num_running -= 1

    def _dequeue(self, group: Group) -> _Tenant:
        name = group.request.tenant
        tenant = self._tenants[name]
        tenant.waiting.remove(group)
        if not len(tenant.waiting):
            del self._backlogged[name]
            self._last_to_wait = tenant
        return tenant

    def _charge(self) -> None:
        """Add the generated tokens to the counters."""
        if not self._has_outputs:
            return
        (slots,) = self._outputs.nonzero()
        for slot in slots.tolist():
            tenant = self._slots[slot]
            if tenant is not None:
                tenant.counter += self._output_weight * int(self._outputs[slot])
        self._outputs[slots] = 0
        self._has_outputs = False

    def _new_tenant(self) -> _Tenant:
        if not self._free_slots:
            self._free_slots.append(len(self._slots))
            self._slots.append(None)
            self._outputs = np.append(self._outputs, 0)
        slot = self._free_slots.pop()
        tenant = self._slots[slot] = _Tenant(GroupQueue(self.key), slot)
        return tenant

    def _floor(self) -> float:
        """Return the smallest counter that a tenant may have when it comes back from idle. It never falls."""
        return (self._by_rank.first() or self._last_to_wait).counter

    def _forget_some(self) -> None:
        """Forget idle tenants whose counter would be raised to the floor anyway."""
        if len(self._tenants) < self._num_remembered:
            return
        self._charge()
        floor = self._floor()
        for name, tenant in list(self._tenants.items()):
            if tenant.counter <= floor and not tenant.num_running and not len(tenant.waiting):
                self._slots[tenant.slot] = None
                self._free_slots.append(tenant.slot)
                del self._tenants[name]
        self._num_remembered = max(_MANY_TENANTS, 2 * len(self._tenants))
