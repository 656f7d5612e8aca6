from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members
from tests.unit.runtime.sampling.bench import CPU


def test_members_keep_their_slots_while_others_come_and_go() -> None:
    rng, members, slots = random.Random(0), Members(32), dict[int, int]()
    for _ in range(2_000):
        row = rng.randrange(32)
        if row in members:
            members.leave(row)
            del slots[row]
        else:
            slots[row] = members.join(row)
        assert {row: members.slot(row) for row in slots} == slots
        assert len(set(slots.values())) == len(slots) == len(members)
        members.check()


def test_leaving_twice_is_leaving_once_and_joining_twice_is_a_fault() -> None:
    members = Members(2)
    members.leave(1)
    members.join(0)
    with pytest.raises(AssertionError):
        members.join(0)
    members.leave(0)
    members.leave(0)
    members.check()
    assert len(members) == 0


def test_a_part_names_positions_rows_and_slots_in_the_order_of_the_batch() -> None:
    members = Members(8)
    slots = {row: members.join(row) for row in (5, 2)}
    part = members.part(np.array([7, 2, 1, 5], dtype=np.int32), CPU)
    assert part is not None
    assert part.positions.tolist() == part.host_positions.tolist() == [1, 3]
    assert part.rows.tolist() == [2, 5]
    assert part.slots.tolist() == [slots[2], slots[5]]
    assert not part.whole
    assert members.part(np.array([7, 1], dtype=np.int32), CPU) is None


def test_a_column_grows_and_keeps_what_it_holds() -> None:
    column = Column(torch.int64, CPU, pad=-1)
    column.put(0, [7])
    column.put(5, [1, 2, 3])
    column.put(2, [4, 5, 6, 7, 8])
    column.put(2, [9, 9])
    lines = column.take(torch.tensor([0, 5, 2])).tolist()
    assert [[number for number in line if number >= 0] for line in lines] == [[7], [1, 2, 3], [9, 9]]
    assert column.scalars(torch.tensor([0, 2])).tolist() == [7, 9]
