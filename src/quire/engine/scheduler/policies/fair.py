"""Fair among tenants: whoever was served least goes first."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest

from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Policy, View
from quire.engine.scheduler.queue import GroupQueue

_MANY_TENANTS = 1_024  # that are remembered, before those that can be forgotten are


@dataclass(slots=True)
class _Tenant:
    waiting: GroupQueue
    counter: float = 0.0  # what it was served, in weighted tokens, lifted when it came back from idle
    num_running: int = 0


class Fair(Policy):
    """A virtual token counter per tenant (Sheng et al., OSDI 2024): the one with the least is let in next.

    A prompt counts when it is let in, an output token when it is computed. A tenant that comes back from idle starts no
    lower than the least of those that wait, so idling saves up nothing. Bound: let U be the larger of input_weight x
    the longest prompt and output_weight x the cache's token slots. Counters of tenants that wait never differ by more
    than U: only the least is let in, which adds a prompt, and what already runs adds at most what fits in the cache. So
    the services of two tenants with requests waiting all the time differ by at most 2 U, however many one sends.
    """

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: dict[str, _Tenant] = {}  # those with somebody waiting
        self._charged: dict[Group, int] = {}  # running -> output tokens that were counted
        self._num_remembered = _MANY_TENANTS  # at this many, some are forgotten
        self._last_to_wait = _Tenant(GroupQueue(self.key))  # the last that has nobody waiting any longer

    def counter(self, tenant: str) -> float:
        """What a tenant was served, in weighted tokens, as counted so far."""
        return self._tenants[tenant].counter if tenant in self._tenants else 0.0

    def choose(self, view: View) -> Group | None:
        if len(self._backlogged) > 1:  # else there is no choice
            for group in self._charged:
                self._charge(group, view.tick)
        least = min(self._backlogged.values(), key=lambda tenant: tenant.counter, default=None)
        return None if least is None else least.waiting.first()

    def soon(self, view: View, count: int) -> list[Group]:  # noqa: ARG002 - Policy's signature
        least = nsmallest(count, self._backlogged.values(), key=lambda tenant: tenant.counter)
        return [group for tenant in least for group in tenant.waiting.head(count // len(least))]

    def added(self, group: Group, view: View) -> None:
        name = group.request.tenant
        if name not in self._tenants:
            self._forget_some()
            self._tenants[name] = _Tenant(GroupQueue(self.key))
        tenant = self._tenants[name]
        if name not in self._backlogged:
            for running in self._charged:
                self._charge(running, view.tick)
            tenant.counter = max(tenant.counter, self._floor())
            self._backlogged[name] = tenant
        tenant.waiting.add(group)

    def admitted(self, group: Group, view: View) -> None:  # noqa: ARG002 - Policy's signature
        tenant = self._dequeue(group)
        tenant.num_running += 1
        if not group.num_preemptions:  # what was taken from it is not its debt
            tenant.counter += self._input_weight * group.num_prompt
        self._charged[group] = _num_outputs(group, 0)

    def left(self, group: Group, view: View) -> None:
        if not group.running:
            self._dequeue(group)
            return
        self._charge(group, view.tick)
        del self._charged[group]
        self._tenants[group.request.tenant].num_running -= 1

    def _dequeue(self, group: Group) -> _Tenant:
        name = group.request.tenant
        tenant = self._tenants[name]
        tenant.waiting.remove(group)
        if not len(tenant.waiting):
            del self._backlogged[name]
            self._last_to_wait = tenant
        return tenant

    def _charge(self, group: Group, tick: int) -> None:
        """Count what a group has computed since it was last charged."""
        outputs, before = _num_outputs(group, tick), self._charged[group]
        if outputs > before:
            self._charged[group] = outputs
            self._tenants[group.request.tenant].counter += self._output_weight * (outputs - before)

    def _floor(self) -> float:
        """Where a tenant that comes back from idle begins, at least. Never falls."""
        return min((tenant.counter for tenant in self._backlogged.values()), default=self._last_to_wait.counter)

    def _forget_some(self) -> None:
        """Idle tenants that would be lifted to the floor anyway need not be remembered."""
        if len(self._tenants) < self._num_remembered:
            return
        floor = self._floor()
        for name, tenant in list(self._tenants.items()):
            if tenant.counter <= floor and not tenant.num_running and not len(tenant.waiting):
                del self._tenants[name]
        self._num_remembered = max(_MANY_TENANTS, 2 * len(self._tenants))


def _num_outputs(group: Group, tick: int) -> int:
    """Tokens a group has generated, those of samples that ended too."""
    live = sum(max(sequence.computed_at(tick) - group.num_prompt + 1, len(sequence.outputs)) for sequence in group.live)
    return live + sum(len(sample.token_ids) for sample in group.ended)
