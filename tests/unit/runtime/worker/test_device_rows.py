"""Rows kept for a GPU hold what plain rows hold, by fewer copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.runtime.worker.device_rows import DeviceRows
from quire.runtime.worker.rows import Rows
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import NewRow, RowTokens
from tiny_models import DEVICE

PLACE = (4, 20, 4, torch.device(DEVICE))  # rows, capacity, block size


def new(row: int, tokens: list[int], blocks: tuple[int, ...] = ()) -> NewRow:
    ids = np.array(tokens, dtype=np.int32)
    return NewRow(row, ids, len(tokens) - 1, blocks, SamplingParams(), TokenRules(), sample_index=0, seed=0)


def tokens(row: int, start: int, ids: list[int]) -> RowTokens:
    return RowTokens(row, start, np.array(ids, dtype=np.int32))


def used(rows: Rows) -> None:
    rows.place([new(0, [5, 6, 7]), new(3, [9, 1], (4, 2)), new(1, list(range(10, 30)), (7,))])
    rows.grant(*(np.array(each, dtype=np.int32) for each in ([3, 0, 3], [2, 0, 1], [11, 12, 13])))
    which = np.array([3, 0], dtype=np.int64)
    rows.append(which, torch.from_numpy(which).to(DEVICE), torch.tensor([44, -1], device=DEVICE))
    rows.release((1,))
    rows.place([])
    rows.place([new(1, [2])])
    rows.write([])
    rows.write([tokens(3, 1, [70, 71, 72]), tokens(1, 1, []), tokens(0, 3, [80])])


def test_rows_hold_the_same_on_either_way() -> None:
    plain, device = Rows(*PLACE), DeviceRows(*PLACE)
    for rows in (plain, device):
        used(rows)
        rows.check()
    assert device.history.lengths[:4].tolist() == plain.history.lengths.tolist() == [4, 1, 0, 4]
    assert device.history.num_prompt[:4].tolist() == plain.history.num_prompt.tolist()
    assert torch.equal(device.tokens[:4], plain.tokens)
    assert torch.equal(device.tables[:4], plain.tables)
    assert (device.host_tables[:4] == plain.tables.cpu().numpy()).all()
    assert (device.lengths[:4] == plain.lengths).all()
    assert plain.tokens[3, :4].tolist() == [9, 70, 71, 72]
    assert plain.tokens[0, :4].tolist() == [5, 6, 7, 80]


def test_a_write_may_make_a_row_shorter_and_one_row_is_written_once() -> None:
    for rows in (Rows(*PLACE), DeviceRows(*PLACE)):
        rows.place([new(2, [5, 6, 7, 8])])
        rows.write([tokens(2, 2, [9])])
        rows.check()
        assert rows.lengths[2] == int(rows.history.lengths[2]) == 3
        with pytest.raises(AssertionError, match="two writes to one row"):
            rows.write([tokens(2, 3, [1]), tokens(2, 3, [2])])


def test_the_spare_row_stays_empty() -> None:
    rows = DeviceRows(*PLACE)
    used(rows)
    assert rows.spare == 4
    assert not rows.tokens[4].any()
    assert rows.append_on_device(torch.tensor([-1], device=DEVICE), torch.tensor([3], device=DEVICE)) is None
    rows.check()
