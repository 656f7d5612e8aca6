"""What a plan tells the workers of the blocks of rows: new rows bring theirs, other rows are granted them."""

from __future__ import annotations

from plain_groups import add_sequence, make_group
from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.types.step import NO_ROWS, StepPlan
from quire.types.transfer import NO_TRANSFERS


def make_sequence(pool: BlockPool, row: int) -> Sequence:
    sequence = add_sequence(make_group([1, 2, 3, 4, 5], row))
    sequence.row, sequence.table = row, BlockTable(pool, 4)
    return sequence


def finish(builder: PlanBuilder, pool: BlockPool) -> StepPlan:
    return builder.finish(0, NO_ROWS, (), NO_TRANSFERS, (), pool, is_guided=False)[0]


def grants(plan: StepPlan) -> list[tuple[int, int, int]]:
    columns = (plan.grant_rows, plan.grant_slots, plan.grant_blocks)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_new_row_brings_the_blocks_that_it_gets_in_the_same_plan() -> None:
    pool = BlockPool(8)
    builder, sequence = PlanBuilder(64), make_sequence(pool, 3)
    builder.introduce(sequence)
    builder.append(3, sequence.table, 5)
    plan = finish(builder, pool)
    (new,) = plan.new_rows
    assert (new.row, new.block_ids, new.token_ids.tolist()) == (3, tuple(sequence.table.blocks), [1, 2, 3, 4, 5])
    assert len(new.block_ids) == 2
    assert not grants(plan)


def test_a_row_that_the_workers_know_is_granted_its_blocks() -> None:
    pool = BlockPool(8)
    known, new = make_sequence(pool, 0), make_sequence(pool, 1)
    known.table.append(4)
    builder = PlanBuilder(64)
    builder.introduce(new)
    builder.append(0, known.table, 6)
    builder.append(1, new.table, 4)
    first, second = known.table.blocks[1:]
    plan = finish(builder, pool)
    assert grants(plan) == [(0, 1, first), (0, 2, second)]
    assert [row.row for row in plan.new_rows] == [1]


def test_a_new_row_that_is_dropped_is_not_sent() -> None:
    pool = BlockPool(8)
    builder, rows = PlanBuilder(64), [make_sequence(pool, row) for row in range(3)]
    for row, sequence in enumerate(rows):
        builder.introduce(sequence)
        builder.append(row, sequence.table, 4)
    assert builder.drop([1]) == {1: 0}
    assert [builder.introduces(row) for row in range(3)] == [True, False, True]
    assert [new.row for new in finish(builder, pool).new_rows] == [0, 2]
