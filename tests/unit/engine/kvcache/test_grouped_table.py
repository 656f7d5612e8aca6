"""Tables of sequences whose layers keep windows and states: what they read, and where states are kept."""

from __future__ import annotations

import pytest

from quire.config.kv_cache import KVGroups
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.grouped_table import KEPT_TOKENS, GroupedTable
from quire.engine.kvcache.table import Move

SIZE = 4


def made(groups: KVGroups, num_blocks: int = 2_000) -> tuple[GroupedPool, GroupedTable]:
    pool = GroupedPool(num_blocks, groups, SIZE, max_chunk=64)
    return pool, GroupedTable(pool, SIZE)


def test_a_table_reads_the_blocks_that_its_next_token_sees() -> None:
    pool, table = made(KVGroups(window=6, num_window_blocks=2))
    for position in range(41):
        table.leave_window(position)
        table.append(1)
        seen = {table.blocks[each // SIZE] for each in range(max(position - 5, 0), position + 1)}
        assert {block for block in table.blocks if pool.is_read(block)} == seen
        table.check()
    table.free()
    assert pool.num_window_blocks == 0
    pool.check()


@pytest.mark.parametrize("size", [8, 6])
def test_a_table_frees_the_blocks_of_a_chunk_that_has_ended(size: int) -> None:
    pool, table = made(KVGroups(window=size, num_window_blocks=2, is_chunked=True))
    for position in range(41):
        table.leave_window(position)
        table.append(1)
        seen = {table.blocks[each // SIZE] for each in range(position // size * size, position + 1)}
        assert {block for block in table.blocks if pool.is_read(block)} == seen
        table.check()
    table.free()
    assert pool.num_window_blocks == 0


def test_states_are_kept_at_the_end_of_a_prompt_and_every_so_many_tokens() -> None:
    pool, table = made(KVGroups(num_states=20, blocks_per_state=1))
    length = 2 * KEPT_TOKENS + 41
    table.append(length)
    moves = table.plan_states(0, length, (length // SIZE * SIZE,), trails=False)
    assert [position for position, _, _ in moves] == [0, KEPT_TOKENS, 2 * KEPT_TOKENS, length // SIZE * SIZE]
    assert [source for _, _, source in moves[1:]] == [slot for _, slot, _ in moves[:-1]]
    assert pool.states is not None
    assert sorted(pool.states.blocks) == sorted(table.blocks[p // SIZE - 1] for p, _, _ in moves[1:])


def test_while_a_sequence_generates_its_last_two_states_stay() -> None:
    pool, table = made(KVGroups(num_states=20, blocks_per_state=1))
    assert pool.states is not None
    for position in range(100):
        pool.begin_plan()
        table.append(1)
        table.plan_states(position, position + 1, (), trails=True)
        pool.states.check()
    assert [table.blocks.index(block) for block in pool.states.blocks] == [80 // SIZE - 1, 96 // SIZE - 1]


def test_tables_that_share_a_state_leave_it_before_they_write() -> None:
    pool, table = made(KVGroups(num_states=4, blocks_per_state=1))
    table.append(3)
    ((_, slot, source),) = table.plan_states(0, 3, (), trails=False)
    assert source == -1
    other = table.fork()
    for each in (table, other):
        each.append(1)
    found = [each.plan_states(3, 4, (), trails=True) for each in (table, other)]
    assert [move[2] for (move,) in found] == [slot, slot]
    assert len({slot, *(move[1] for (move,) in found)}) == 3
    pool.begin_plan()
    assert pool.num_free_states == 2


def drafting(length: int, count: int, num_rows: int = 1) -> tuple[GroupedPool, GroupedTable, list[Move]]:
    """A sequence of `length` tokens whose next step also computes `count` draft tokens; eight states."""
    pool, table = made(KVGroups(num_states=8, blocks_per_state=1))
    table.append(length)
    table.plan_states(0, length, (), trails=False)
    table.append(count)
    return pool, table, table.plan_draft(length, count, num_rows)


def test_a_draft_whose_tokens_are_all_accepted_leaves_its_state_where_it_is() -> None:
    pool, table, ((position, slot, source),) = drafting(18, 5)
    assert (position, source) == (18, table.state)
    assert table.settle_draft(23, ()) == 23
    assert table.state == slot
    table.append(1)
    assert table.plan_states(23, 24, (), trails=True) == []
    table.free()
    pool.check()


def test_a_rejected_token_takes_the_state_back_to_before_the_draft() -> None:
    pool, table, ((_, _, source),) = drafting(18, 5)
    assert table.settle_draft(22, ()) == 18
    assert table.state == source
    table.truncate(18)
    table.append(5)
    assert table.plan_states(18, 23, (), trails=True) == [(18, source, source)]
    table.free()
    assert pool.states is not None
    assert (pool.states.num_free, pool.states.num_drafted) == (8, 0)


def test_states_inside_a_draft_become_checkpoints_where_its_tokens_were_accepted() -> None:
    pool, table, moves = drafting(16, 40)
    assert [position for position, _, _ in moves] == [16, 32, 48]
    assert table.settle_draft(50, ()) == 48
    assert pool.states is not None
    assert sorted(pool.states.blocks) == sorted(table.blocks[place // SIZE - 1] for place in (16, 32))
    table.check()
    pool.states.check()


def test_a_table_that_is_freed_releases_the_states_of_its_draft() -> None:
    pool, table, moves = drafting(16, 40, num_rows=5)
    assert len(moves) == 2  # beside one for each row and one more
    assert not table.takes_draft(5)
    table.free()
    assert pool.states is not None
    assert (pool.states.num_free, pool.states.num_drafted) == (8, 0)
