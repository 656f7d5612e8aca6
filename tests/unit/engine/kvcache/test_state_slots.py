"""The slots of recurrent states: who holds them, and which checkpoint goes first."""

from __future__ import annotations

import pytest

from quire.engine.kvcache.state_slots import StateSlots
from quire.types.errors import OutOfBlocks


def kept(states: StateSlots, block: int, *, is_end: bool = True) -> int:
    """A checkpoint that nobody reads."""
    slot = states.take()
    states.keep(block, slot, is_end=is_end)
    states.release(slot)
    states.check()
    return slot


def test_a_slot_that_is_released_is_free_at_once() -> None:
    states = StateSlots(1)
    slot = states.take()
    with pytest.raises(OutOfBlocks):
        states.take()
    states.release(slot)
    assert states.take() == slot


def test_a_slot_that_a_row_reads_in_this_plan_is_free_in_the_next() -> None:
    states = StateSlots(1)
    states.leave(states.take())
    assert states.num_free == 0
    states.begin_plan()
    assert states.num_free == 1
    states.check()


def test_checkpoints_in_the_middle_go_before_ends_and_of_each_the_least_recently_used() -> None:
    states = StateSlots(5)
    for block, is_end in ((10, True), (11, False), (12, True), (13, False), (14, True)):
        kept(states, block, is_end=is_end)
    states.release(states.hold(states.slot_of(10) or 0))  # read once more
    gone = []
    for _ in range(5):
        before = set(states.blocks)
        states.take()
        gone += sorted(before - set(states.blocks))
        states.check()
    assert gone == [11, 13, 12, 14, 10]


def test_a_checkpoint_that_is_read_is_not_evicted() -> None:
    states = StateSlots(2)
    read = states.hold(kept(states, 7))
    kept(states, 8)
    states.take()
    with pytest.raises(OutOfBlocks):
        states.take()
    assert 7 in states
    assert 8 not in states
    states.release(read)
    states.take()
    assert 7 not in states


def test_the_slot_of_a_forgotten_checkpoint_is_free_when_its_reader_leaves() -> None:
    states = StateSlots(1)
    slot, version = states.hold(kept(states, 7)), states.version
    states.forget(7)
    assert states.version > version
    assert states.num_free == 0
    states.release(slot)
    assert states.num_free == 1
    states.check()


def test_a_checkpoint_moves_to_a_block_that_has_none() -> None:
    states = StateSlots(3)
    slot, other = kept(states, 7), kept(states, 8)
    states.move(7, 9)
    states.move(9, 8)
    assert (states.slot_of(9), states.slot_of(8), states.slot_of(7)) == (slot, other, None)
    states.check()


def test_where_an_answer_ended_its_checkpoint_becomes_an_end() -> None:
    states = StateSlots(2)
    kept(states, 7, is_end=False)
    kept(states, 8, is_end=False)
    states.set_end(7)
    states.take()
    assert 7 in states
    assert 8 not in states
