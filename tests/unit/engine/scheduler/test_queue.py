"""A queue of groups, against a sorted list."""

from __future__ import annotations

import random

import pytest

from plain_groups import make_group
from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import Key
from quire.engine.scheduler.queue import GroupQueue, RunningGroups


def by_prompt(group: Group) -> Key:
    """Long prompts first; of equal ones, the one that came first."""
    return -group.num_prompt, group.ordinal


@pytest.mark.parametrize("seed", range(4))
def test_groups_come_and_go_are_deferred_and_resumed_as_in_a_sorted_list(seed: int) -> None:
    rng, queue = random.Random(seed), GroupQueue(by_prompt)
    groups: list[Group] = []
    deferred: set[Group] = set()
    for ordinal in range(1_500):
        choice, ready = rng.random(), [group for group in groups if group not in deferred]
        version, before = queue.version, list(groups)
        if choice < 0.4 or not groups:
            group = make_group([1] * rng.randint(1, 6), ordinal)
            groups.append(group)
            queue.add(group)
        elif choice < 0.6 and ready:
            group = rng.choice(ready)
            queue.defer(group)
            deferred.add(group)
        elif choice < 0.75 and deferred:
            group = rng.choice(sorted(deferred, key=by_prompt))
            queue.resume(group)
            deferred.remove(group)
        else:
            group = rng.choice(groups)
            queue.remove(group)
            groups.remove(group)
            deferred.discard(group)
        queue.check()
        assert (queue.version != version) == (groups != before), "only groups that come or go change the version"
        _compare(queue, groups, deferred, rng.randrange(5))


def _compare(queue: GroupQueue, groups: list[Group], deferred: set[Group], count: int) -> None:
    wanted = sorted(groups, key=by_prompt)
    ready = [group for group in wanted if group not in deferred]
    assert list(queue) == wanted
    assert (len(queue), queue.num_ready) == (len(wanted), len(ready))
    assert queue.head(count) == ready[:count]
    assert queue.first() is (ready[0] if ready else None)
    assert queue.last() is (ready[-1] if ready else None)
    assert {group for group in wanted if queue.is_deferred(group)} == deferred


def test_members_may_leave_while_the_queue_is_walked_through() -> None:
    queue = GroupQueue(by_prompt)
    groups = [make_group([1], ordinal) for ordinal in range(5)]
    for group in groups:
        queue.add(group)
    queue.defer(groups[3])
    for group in queue:
        queue.remove(group)
    assert len(queue) == 0


def test_a_group_that_is_not_there_is_no_other_group() -> None:
    queue = GroupQueue(by_prompt)
    queue.add(make_group([1], 1))
    for stranger in (make_group([1], 0), make_group([1], 1), make_group([1], 2)):
        with pytest.raises(KeyError):
            queue.remove(stranger)
        with pytest.raises(KeyError):
            queue.defer(stranger)
        with pytest.raises(KeyError):
            queue.resume(stranger)
    assert len(queue) == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_last_running_group_is_the_one_with_the_largest_key_whenever_it_came(seed: int) -> None:
    rng, running, groups = random.Random(seed), RunningGroups(by_prompt), list[Group]()
    assert running.last() is None
    for ordinal in range(400):
        if groups and rng.random() < 0.45:
            group = rng.choice(groups)
            running.remove(group)
            groups.remove(group)
        else:
            groups.append(make_group([1] * rng.randint(1, 6), ordinal))
            running.add(groups[-1])
        assert len(running) == len(groups)
        assert set(running) == set(groups)
        if rng.random() < 0.3:
            assert running.last() is max(groups, key=by_prompt, default=None)
    for group in running:
        running.remove(group)  # while it is walked through
    assert not len(running)


def test_a_running_group_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        RunningGroups(by_prompt).remove(make_group([1], 0))
