"""The fair policy's choice, against a scan of all waiting tenants."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest

from plain_groups import add_sequence
from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies import fair
from quire.engine.scheduler.policies.base import SchedulerView
from quire.engine.scheduler.policies.fair import Fair
from quire.engine.scheduler.queue import GroupQueue
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules

NUM_ROWS = 16
VIEW = cast("SchedulerView", None)  # the fair policy does not read it


def make_group(tenant: str, ordinal: int, num_prompt: int = 2) -> Group:
    """A group of one sequence."""
    sampling = SamplingParams(max_tokens=8)
    request = Submit(f"r{ordinal}", (1,) * num_prompt, sampling, TokenRules(), tenant=tenant)
    group = Group(request, ordinal, num_prompt + 8, ordinal, ordinal, sampling)
    add_sequence(group)
    return group


class SimpleScan:
    """Fairness by scanning all waiting tenants, in the order in which they began to wait."""

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self.counters: dict[str, float] = {}
        self.waiting: dict[str, list[Group]] = {}
        self.deferred: set[Group] = set()
        self._last_to_wait = ""

    def add(self, group: Group) -> None:
        tenant = group.request.tenant
        if tenant not in self.waiting:
            last = self.counters.get(self._last_to_wait, 0.0)
            floor = min((self.counters[each] for each in self.waiting), default=last)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
            self.waiting[tenant] = []
        self.waiting[tenant].append(group)
        self.waiting[tenant].sort(key=lambda each: each.ordinal)

    def choose(self) -> Group | None:
        ready = [
            (self.counters[tenant], turn, group)
            for turn, (tenant, groups) in enumerate(self.waiting.items())
            for group in groups
            if group not in self.deferred
        ]
        return min(ready, key=lambda each: (each[0], each[1], each[2].ordinal))[2] if ready else None

    def likely_next(self, count: int) -> list[Group]:
        ready = [[group for group in groups if group not in self.deferred] for groups in self.waiting.values()]
        tenants = sorted(filter(None, ready), key=lambda groups: self.counters[groups[0].request.tenant])[:count]
        return [group for groups in tenants for group in groups[: count // len(tenants)]]

    def admit(self, group: Group) -> None:
        self.remove(group)
        if not group.num_preemptions:
            self.counters[group.request.tenant] += self._input_weight * group.num_prompt

    def remove(self, group: Group) -> None:
        tenant = group.request.tenant
        self.waiting[tenant].remove(group)
        self.deferred.discard(group)
        if not self.waiting[tenant]:
            del self.waiting[tenant]
            self._last_to_wait = tenant

    def generate(self, tenant: str, num_tokens: int) -> None:
        self.counters[tenant] += self._output_weight * num_tokens


class Load:
    """Random events, which the policy and the scan both see."""

    def __init__(self, rng: random.Random, input_weight: float, output_weight: float) -> None:
        self.rng = rng
        self.policy = Fair(input_weight, output_weight, NUM_ROWS)
        self.scan = SimpleScan(input_weight, output_weight)
        self.running: list[Group] = []
        self.num_groups = 0

    def arrive(self) -> None:
        tenant = f"tenant {self.rng.randrange(30) if self.rng.random() < 0.8 else self.num_groups}"
        group = make_group(tenant, self.num_groups, self.rng.randint(1, 5))
        self.num_groups += 1
        self.policy.added(group, VIEW)
        self.scan.add(group)

    def admit(self) -> None:
        group, free = self.policy.choose(VIEW), set(range(NUM_ROWS)) - {each.live[0].row for each in self.running}
        if group is None or not free:
            return
        group.live[0].row = min(cast("set[int]", free))
        self.policy.admitted(group, VIEW)
        self.scan.admit(group)
        group.is_running = True
        self.running.append(group)

    def defer_or_resume(self) -> None:
        groups = [group for groups in self.scan.waiting.values() for group in groups]
        for group in self.rng.sample(groups, min(len(groups), self.rng.randint(1, 6))):
            if group in self.scan.deferred:
                self.policy.resumed(group)
                self.scan.deferred.remove(group)
            else:
                self.policy.deferred(group)
                self.scan.deferred.add(group)

    def generate(self) -> None:
        rows = [cast("int", group.live[0].row) for group in self.running]
        if rows and self.rng.random() < 0.8:
            self.policy.note_generated(np.array(rows, dtype=np.int64))
            for group in self.running:
                self.scan.generate(group.request.tenant, 1)
        elif rows:
            group = self.rng.choice(self.running)
            self.policy.note_generated_paced(group, 3)
            self.scan.generate(group.request.tenant, 3)

    def cancel(self) -> None:
        groups = [group for groups in self.scan.waiting.values() for group in groups]
        if groups:
            group = self.rng.choice(groups)
            self.policy.removed(group, VIEW)
            self.scan.remove(group)

    def end(self) -> Group | None:
        if not self.running:
            return None
        group = self.running.pop(self.rng.randrange(len(self.running)))
        self.policy.removed(group, VIEW)
        group.is_running, group.live[0].row = False, None
        return group

    def preempt(self) -> None:
        if (group := self.end()) is not None:
            group.num_preemptions += 1
            self.policy.added(group, VIEW)
            self.scan.add(group)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 0.0), (0.0, 1.0), (0.25, 0.75)])
def test_the_choice_is_that_of_a_scan_over_all_waiting_tenants(
    seed: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair, "_MANY_TENANTS", 24)  # so that idle tenants are forgotten
    monkeypatch.setattr(fair, "_MANY_ENTRIES", 4)
    rng = random.Random(seed)
    load = Load(rng, *weights)
    num_chosen = 0
    for _ in range(1_200):
        event = rng.choices(
            [load.arrive, load.admit, load.defer_or_resume, load.generate, load.cancel, load.end, load.preempt],
            weights=[30, 30, 20, 15, 5, 20, 5],
        )[0]
        event()
        if rng.random() < 0.7:  # between other choices, several events happen
            chosen = load.policy.choose(VIEW)
            assert chosen is load.scan.choose()
            if len(load.scan.waiting) > 1:  # otherwise the choice has not counted the generated tokens
                count = rng.randint(1, 10)
                assert load.policy.likely_next(VIEW, count) == load.scan.likely_next(count)
            num_chosen += chosen is not None
    assert num_chosen > 400
    assert load.scan.choose() is not None


def _submit_one_each(policy: Fair, num_tenants: int) -> list[Group]:
    groups = [make_group(f"tenant {number}", number) for number in range(num_tenants)]
    for group in groups:
        policy.added(group, VIEW)
    return groups


def test_a_choice_among_2000_tenants_ranks_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither arrivals nor admissions look at every waiting tenant."""
    ranked: list[object] = []
    rank = fair._rank
    monkeypatch.setattr(fair, "_rank", lambda tenant: ranked.append(tenant) or rank(tenant))  # type: ignore[func-returns-value]
    policy = Fair(1.0, 2.0, num_rows=256)
    groups = _submit_one_each(policy, 2_000)
    assert len(ranked) <= 4 * 2_000
    for row in range(256):
        ranked.clear()
        group = policy.choose(VIEW)
        assert group is groups[row]
        group.live[0].row = row
        policy.admitted(group, VIEW)
        policy.note_generated(np.arange(row + 1))
        assert len(ranked) <= 4


def test_the_groups_that_are_likely_next_are_found_by_ranking_few_of_2000_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Fair(1.0, 2.0, num_rows=4)
    groups = _submit_one_each(policy, 2_000)
    for group in groups[:1_000]:
        policy.deferred(group)
    assert policy.likely_next(VIEW, 8) == groups[1_000:1_008]
    ranked: list[object] = []
    rank = fair._rank
    monkeypatch.setattr(fair, "_rank", lambda tenant: ranked.append(tenant) or rank(tenant))  # type: ignore[func-returns-value]
    for _ in range(10):
        assert policy.likely_next(VIEW, 8) == groups[1_000:1_008]
    assert len(ranked) <= 10 * 2 * 8


def test_tenants_whose_groups_are_all_deferred_are_skipped_without_ranking_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Fair(1.0, 2.0, num_rows=4)
    groups = _submit_one_each(policy, 2_000)
    for group in groups[:-1]:
        policy.deferred(group)
    assert policy.choose(VIEW) is groups[-1]
    looked_at: list[object] = []
    num_ready = cast("property", GroupQueue.num_ready).fget
    assert num_ready is not None
    monkeypatch.setattr(GroupQueue, "num_ready", property(lambda queue: looked_at.append(queue) or num_ready(queue)))  # type: ignore[func-returns-value]
    for _ in range(10):
        assert policy.choose(VIEW) is groups[-1]
    assert len(looked_at) == 10
    policy.resumed(groups[7])
    assert policy.choose(VIEW) is groups[7]


def test_requests_that_are_cancelled_while_another_waits_leave_nothing_behind() -> None:
    policy = Fair(1.0, 2.0, num_rows=4)
    policy.added(make_group("waits", 0), VIEW)
    for number in range(1, 20_000):
        group = make_group(f"tenant {number}", number)
        policy.added(group, VIEW)
        policy.removed(group, VIEW)
    assert len(policy._tenants) <= fair._MANY_TENANTS
    assert max(len(policy._by_rank), len(policy._ready_by_rank)) <= fair._MANY_ENTRIES
