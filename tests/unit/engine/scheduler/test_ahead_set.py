"""Sequences that run ahead are counted by ticks, and looked at again at their event, and once."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from plain_groups import add_sequence, make_group
from quire.engine.decoding.controller import StepController
from quire.engine.decoding.group import Sequence, SequenceState
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.ahead_set import AheadSet
from quire.types.sampling import TokenRules


class AheadFor:
    """A proposer whose sequence runs ahead for so many tokens before it is asked again."""

    is_observed = False

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead


@dataclass
class Counted:
    """A sequence whose tokens are counted one by one."""

    sequence: Sequence
    computed: int
    until: int  # tokens at which it must be looked at because it may run no further
    capacity: int = 0  # tokens that its blocks have room for
    joins_at: int = 0  # the tick at which it begins

    @property
    def is_running(self) -> bool:
        return self.sequence.state is SequenceState.AHEAD

    @property
    def next_event(self) -> int:
        """The tick at which it joins, or has computed all that it may."""
        ahead = self.sequence.ahead
        return self.joins_at if not self.is_running or ahead is None else ahead.tick + self.until - self.computed


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_members_have_computed_what_counting_by_hand_says_and_are_looked_at_when_they_must(
    size: int, seed: int
) -> None:
    rng, ahead_set, members = random.Random(seed), AheadSet(12, size), list[Counted]()
    free = list(range(12))
    for number in range(500):
        if free and rng.random() < 0.4:
            members.append(_begin(rng, ahead_set, number, free.pop()))
        looked_at = list(ahead_set.take_events())
        wanted = [each for each in members if each.next_event == ahead_set.tick]
        assert set(looked_at) == {each.sequence for each in wanted}
        for each in wanted:
            _serve(ahead_set, each, size)
        _append_blocks(ahead_set, members, size)
        running = [each for each in members if each.is_running]
        ahead_set.check()
        for each in running:
            ahead_set.check_member(each.sequence)
        _compare(ahead_set, running)
        ahead_set.tick += 1
        for each in running:
            each.computed += 1
        for each in [each for each in members if rng.random() < 0.06 or each.sequence.ahead is None]:
            free.append(_leave(ahead_set, each))
            members.remove(each)


def _begin(rng: random.Random, ahead_set: AheadSet, number: int, row: int) -> Counted:
    """A sequence takes its first sample in this step or a later one."""
    group = make_group([1] * rng.randint(1, 20), number, max_tokens=rng.randint(2, 40))
    num_ahead = rng.choice([1, 2, 7, 1_000])
    controller = StepController(TokenRules(), proposer=AheadFor(num_ahead))  # type: ignore[arg-type]
    sequence = add_sequence(group, controller=controller)
    sequence.row, sequence.num_computed = row, group.num_prompt
    joins_at = ahead_set.tick + rng.choice([0, 1, 3])
    ahead_set.start_at(sequence, joins_at)
    assert sequence.state is SequenceState.STARTING
    until = min(group.limit - 1, group.num_prompt + num_ahead)
    return Counted(sequence, group.num_prompt, until, joins_at=joins_at)


def _serve(ahead_set: AheadSet, each: Counted, size: int) -> None:
    """As the scheduler does: it joins, or leaves because it may run no further."""
    sequence = each.sequence
    if each.is_running:
        ahead_set.leave(sequence)
        sequence.state = SequenceState.DRAINING
        assert sequence.num_computed == each.computed
        return
    sequence.table = BlockTable(BlockPool(100), size)
    sequence.table.append(each.computed + 1)
    each.capacity = sequence.table.capacity
    ahead_set.join(sequence)


def _append_blocks(ahead_set: AheadSet, members: list[Counted], size: int) -> None:
    """A block for each member whose blocks are full, all at once."""
    full = {each.sequence.row: each for each in members if each.is_running and each.computed == each.capacity}
    found = ahead_set.take_full()
    assert found == {row: each.sequence.table.blocks for row, each in full.items()}
    blocks = {row: 1_000 + place for place, row in enumerate(found)}
    slots = ahead_set.append_blocks(found, list(blocks.values()))
    assert dict(zip(found, slots, strict=True)) == {row: each.computed // size for row, each in full.items()}
    for row, each in full.items():
        assert each.sequence.table.blocks[each.computed // size :] == [blocks[row]]
        each.capacity += size


def _compare(ahead_set: AheadSet, running: list[Counted]) -> None:
    assert len(ahead_set) == len(running)
    snapshot = ahead_set.snapshot()
    assert sorted(snapshot.tolist()) == sorted(each.sequence.row for each in running if each.sequence.row is not None)
    assert ahead_set.snapshot() is snapshot
    assert not snapshot.flags.writeable
    for each in running:
        assert each.sequence.num_planned == each.computed


def _leave(ahead_set: AheadSet, each: Counted) -> int:
    row = each.sequence.row
    assert row is not None
    ahead_set.leave(each.sequence)
    ahead_set.leave(each.sequence)
    assert each.sequence.ahead is None
    assert each.sequence.num_computed == each.computed
    each.sequence.state = SequenceState.WAITING
    return row


def test_a_sequence_that_left_and_joined_again_is_looked_at_once() -> None:
    """With nothing in flight it joins again in the tick in which it left, and needs a block when it would have."""
    ahead_set = AheadSet(1, 4)
    sequence = add_sequence(make_group([1, 2], max_tokens=9))
    sequence.row, sequence.num_computed = 0, 2
    sequence.table = BlockTable(BlockPool(8), 4)
    sequence.table.append(3)
    for _ in range(3):
        ahead_set.start_at(sequence, ahead_set.tick)
        assert list(ahead_set.take_events()) == [sequence]
        ahead_set.join(sequence)
        ahead_set.leave(sequence)
    ahead_set.start_at(sequence, ahead_set.tick)
    assert list(ahead_set.take_events()) == [sequence]
    ahead_set.join(sequence)
    for full in ({}, {0: sequence.table.blocks}, {}):
        ahead_set.tick += 1
        assert ahead_set.take_full() == full
        assert not list(ahead_set.take_events())


def test_a_sequence_that_leaves_before_it_has_joined_is_not_looked_at() -> None:
    ahead_set = AheadSet(1, 4)
    sequence = add_sequence(make_group([1, 2], max_tokens=9))
    sequence.row = 0
    ahead_set.start_at(sequence, 1)
    ahead_set.leave(sequence)
    ahead_set.tick += 1
    assert not list(ahead_set.take_events())


def test_the_table_of_a_member_counts_its_tokens_when_it_leaves() -> None:
    ahead_set = AheadSet(1, 4)
    sequence = add_sequence(make_group([1, 2], max_tokens=99))
    sequence.row, sequence.num_computed = 0, 2
    pool = BlockPool(8)
    sequence.table = BlockTable(pool, 4)
    sequence.table.append(3)
    ahead_set.start(sequence)
    assert list(ahead_set.take_events()) == [sequence]
    ahead_set.join(sequence)
    for _ in range(9):
        ahead_set.tick += 1
        full = ahead_set.take_full()
        ahead_set.append_blocks(full, pool.take(len(full)))
        sequence.table.check(lags=True)
    ahead_set.leave(sequence)
    assert sequence.table.num_tokens == sequence.num_computed == 11


def test_a_snapshot_is_kept_while_nobody_joins_or_leaves() -> None:
    ahead_set = AheadSet(2, 4)
    sequence = add_sequence(make_group([1, 2], max_tokens=9))
    sequence.row, sequence.num_computed = 1, 2
    before = ahead_set.snapshot()
    ahead_set.start_at(sequence, 0)
    assert ahead_set.snapshot() is before
    (found,) = ahead_set.take_events()
    ahead_set.join(found)
    joined = ahead_set.snapshot()
    assert joined.tolist() == [1]
    ahead_set.leave(sequence)
    assert joined.tolist() == [1], "a plan that was made keeps its rows"
    assert np.array_equal(ahead_set.snapshot(), before)
