"""Sequences that run ahead are counted by ticks, and looked at again at their event, and once."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from harness import VOCABULARY, Harness
from plain_groups import add_sequence, make_group
from quire.engine.decoding.controller import StepController
from quire.engine.decoding.group import Sequence, SequenceState
from quire.engine.decoding.tools import DecodingTools
from quire.engine.scheduler.ahead_set import AheadSet
from quire.types.sampling import TokenRules
from toy_decoding import ToyGrammars, ToyProposers
from toy_model import continuation


def taken(ahead_set: AheadSet) -> list[Sequence]:
    """All sequences whose event is at this tick."""
    full, others = ahead_set.take_events()
    return [*full, *others]


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


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_members_have_computed_what_counting_by_hand_says_and_are_looked_at_when_they_must(
    size: int, seed: int
) -> None:
    rng, ahead_set, members = random.Random(seed), AheadSet(12), list[Counted]()
    free = list(range(12))
    for number in range(500):
        if free and rng.random() < 0.4:
            members.append(_begin(rng, ahead_set, number, free.pop()))
        looked_at = taken(ahead_set)
        assert len(set(looked_at)) == len(looked_at)
        wanted = [each.sequence for each in members if _must_be_looked_at(each, ahead_set.tick)]
        assert set(looked_at) == set(wanted)
        full = [each for each in members if each.sequence in looked_at and _serve(ahead_set, each, size)]
        _append_blocks(ahead_set, full, size)
        ahead_set.check()
        running = [each for each in members if each.is_running]
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


def _must_be_looked_at(each: Counted, tick: int) -> bool:
    if not each.is_running:
        return each.joins_at == tick
    return each.computed == min(each.capacity, each.until)


def _serve(ahead_set: AheadSet, each: Counted, size: int) -> bool:
    """As the scheduler does: it joins, or leaves because it may run no further. Returns whether it needs a block."""
    sequence = each.sequence
    if not each.is_running:
        sequence.table.blocks = list(range(each.computed // size + 1))
        each.capacity = len(sequence.table.blocks) * size
        ahead_set.schedule(sequence, ahead_set.join(sequence), each.capacity)
        return False
    if each.computed < each.until:
        return True
    ahead_set.leave(sequence)
    sequence.state = SequenceState.DRAINING
    assert sequence.num_computed == each.computed
    return False


def _append_blocks(ahead_set: AheadSet, full: list[Counted], size: int) -> None:
    """A block for each of them, all at once."""
    blocks = [1_000 + place for place in range(len(full))]
    slots = [len(each.sequence.table.blocks) for each in full]
    assert ahead_set.append_blocks([each.sequence for each in full], blocks, size) == slots
    for each, slot, block in zip(full, slots, blocks, strict=True):
        assert each.computed == each.capacity == slot * size
        assert each.sequence.table.blocks[slot:] == [block]
        assert each.sequence.table.num_tokens == each.computed + 1
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
    ahead_set = AheadSet(1)
    sequence = add_sequence(make_group([1, 2], max_tokens=9))
    sequence.row, sequence.num_computed = 0, 2
    for _ in range(3):
        ahead_set.start_at(sequence, ahead_set.tick)
        (found,) = taken(ahead_set)
        ahead_set.schedule(found, ahead_set.join(found), capacity=4)
        ahead_set.leave(found)
    ahead_set.start_at(sequence, ahead_set.tick)
    (found,) = taken(ahead_set)
    ahead_set.schedule(found, ahead_set.join(found), capacity=4)
    for looked_at in ([], [sequence], []):
        ahead_set.tick += 1
        assert taken(ahead_set) == looked_at


def test_a_snapshot_is_kept_while_nobody_joins_or_leaves() -> None:
    ahead_set = AheadSet(2)
    sequence = add_sequence(make_group([1, 2], max_tokens=9))
    sequence.row, sequence.num_computed = 1, 2
    before = ahead_set.snapshot()
    ahead_set.start_at(sequence, 0)
    assert ahead_set.snapshot() is before
    (found,) = taken(ahead_set)
    ahead_set.join(found)
    joined = ahead_set.snapshot()
    assert joined.tolist() == [1]
    ahead_set.leave(sequence)
    assert joined.tolist() == [1], "a plan that was made keeps its rows"
    assert np.array_equal(ahead_set.snapshot(), before)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_entry_that_a_sequence_left_behind_when_it_lost_its_row_changes_nothing(depth: int) -> None:
    proposers = ToyProposers(True, True)
    engine = Harness(depth=depth, tools=DecodingTools(ToyGrammars(), proposers, lambda: VOCABULARY))
    asked = {f"r{number}": ([number, 5, 7], 100 + number) for number in range(4)}
    for name, (prompt, seed) in asked.items():
        engine.submit(name, prompt, max_tokens=30, seed=seed)

    def list_twice(_: int) -> None:
        for sequences in engine.core._scheduler.ahead._events.values():
            sequences[:] = [*dict.fromkeys(sequences)] * 2

    engine.run(each=list_twice)
    for name, (prompt, seed) in asked.items():
        assert engine.answer(name) == continuation(prompt, 30, seed=seed)
