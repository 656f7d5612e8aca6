"""The slots of recurrent states: who holds them, and which checkpoint goes first."""

from __future__ import annotations

import pytest

from quire.engine.kvcache.state_slots import StateSlots
from quire.types.errors import OutOfBlocks


def kept(states: StateSlots, *path: int, is_end: bool = True) -> int:
    """A checkpoint of the last of some blocks that nobody reads."""
    slot = states.take()
    states.keep(path, len(path), slot, is_end=is_end)
    states.release(slot)
    states.check()
    return slot


def evicted(states: StateSlots, count: int) -> list[int]:
    """The blocks whose checkpoints go when so many slots are needed, in order."""
    gone = []
    for _ in range(count):
        before = set(states.blocks)
        states.take()
        gone += sorted(before - set(states.blocks))
        states.check()
    return gone


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
    assert evicted(states, 5) == [11, 13, 12, 14, 10]


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


def test_the_checkpoint_goes_that_is_cheapest_to_compute_again() -> None:
    """Not the one that was used longest ago. Where a conversation goes on, those before its last one count less."""
    states = StateSlots(4)
    path = range(20)
    kept(states, *path[:9])  # the end of a prompt
    kept(states, *path[:14])  # the last two of its answer
    kept(states, *path[:15])
    kept(states, 30, 31)  # a short prompt
    assert evicted(states, 4) == [13, 8, 31, 14]


def test_a_checkpoint_costs_what_is_computed_again_from_the_one_before_that_is_left() -> None:
    states = StateSlots(3)
    kept(states, *range(1, 11))
    kept(states, *range(1, 14))
    kept(states, *range(20, 24))
    states.forget(10)  # 13 blocks behind the first token now, not 3
    assert evicted(states, 3) == [23, 13]


def test_a_checkpoint_in_the_middle_of_a_prompt_outlives_an_end_that_costs_much_less() -> None:
    states = StateSlots(3)
    kept(states, *range(64), is_end=False)
    kept(states, *range(100, 102))
    kept(states, *range(200, 216))
    assert evicted(states, 3) == [101, 63, 215]


def test_what_nobody_reads_goes_in_time_whatever_it_costs() -> None:
    states = StateSlots(2)
    kept(states, *range(10))
    for block in range(100, 130, 2):
        kept(states, block, block + 1)
    assert 9 not in states


def test_checkpoints_that_are_gone_are_not_remembered() -> None:
    """A sequence that generates leaves checkpoints behind and forgets them: what is left refers to none of them."""
    states = StateSlots(4)
    path = list(range(1_000))
    for count in range(1, 1_001):
        kept(states, *path[:count])
        if count > 2:
            states.forget(path[count - 3])
    last = states._checkpoints[999]
    length = 0
    while last.before is not None:
        last, length = last.before, length + 1
    assert length <= 3
    assert len(states._heap) < 100


def test_checkpoints_that_are_read_or_forgotten_do_not_stay_in_the_order_of_eviction() -> None:
    states = StateSlots(200)
    slots = [kept(states, block) for block in range(150)]
    for slot in slots[:70]:
        states.hold(slot)
    states.check()
    for block in range(70, 150):
        states.forget(block)
    states.check()


def test_an_end_whose_later_one_went_is_continued_again() -> None:
    states = StateSlots(3)
    kept(states, *range(20))
    kept(states, *range(21))  # costs one block: it goes before the one that it continues
    kept(states, 30, 31, 32)
    assert evicted(states, 3) == [20, 32, 19]


def test_of_many_conversations_every_end_stays_while_the_ends_of_their_prompts_go() -> None:
    states = StateSlots(12)
    for number in range(10):
        blocks = range(100 * number, 100 * number + 30)
        kept(states, *blocks[:22])
        kept(states, *blocks[:28])
    assert {block for block in states.blocks if block % 100 == 27} == {100 * number + 27 for number in range(10)}
