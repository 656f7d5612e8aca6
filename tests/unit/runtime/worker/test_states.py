"""Which slots the segments of a step read and write."""

from __future__ import annotations

import numpy as np
import torch

from quire.runtime.transfer import Uploader
from quire.runtime.worker.batch import find_spans
from quire.runtime.worker.states import RowStates
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StateMove, StepPlan


def new(row: int) -> NewRow:
    return NewRow(row, np.arange(3, dtype=np.int32), 3, (), SamplingParams(), TokenRules(), 0, 0)


def made() -> RowStates:
    return RowStates((torch.zeros(9, 4),), 5, Uploader(torch.device("cpu")))


def segments(states: RowStates, plan: StepPlan) -> list[list[int]]:
    states.update(plan)
    found: list[list[int]] = states.segments(plan, plan.decode_rows.astype(np.int64), find_spans(plan)).tolist()
    states.check()
    return found


def plan(*moves: StateMove, decode: tuple[int, ...] = (), chunks: tuple[Chunk, ...] = (), **more: object) -> StepPlan:
    rows = np.asarray(decode, dtype=np.int32)
    return StepPlan(step=0, decode_rows=rows, chunks=chunks, states=moves, **more)  # type: ignore[arg-type]


def test_a_row_begins_without_a_state_and_keeps_its_slot() -> None:
    states = made()
    first = plan(StateMove(1, 0, 6, -1), chunks=(Chunk(1, 0, 3, (1,)),), new_rows=(new(1),))
    assert segments(states, first) == [[0, 3, -1, 6]]
    assert segments(states, plan(decode=(1,))) == [[0, 1, 6, 6]]
    assert segments(states, plan(decode=(1,))) == [[0, 1, 6, 6]]


def test_a_state_moves_while_its_row_decodes() -> None:
    states = made()
    assert segments(states, plan(StateMove(2, 3, 4, 7), decode=(2,), new_rows=(new(2),))) == [[0, 1, 7, 4]]
    assert segments(states, plan(StateMove(2, 4, 5, 4), decode=(2,))) == [[0, 1, 4, 5]]
    assert states.slots[2].tolist() == [4, 5]
    assert segments(states, plan(decode=(2,))) == [[0, 1, 5, 5]]


def test_a_chunk_is_cut_where_its_state_moves() -> None:
    states = made()
    moves = (StateMove(0, 4, 1, 5), StateMove(0, 6, 2, 1), StateMove(0, 7, 3, 2), StateMove(3, 2, 8, 5))
    step = plan(*moves, chunks=(Chunk(0, 4, 8), Chunk(3, 2, 1)), new_rows=(new(0), new(3)))
    assert segments(states, step) == [[0, 2, 5, 1], [2, 1, -2, 2], [3, 5, -2, 3], [8, 1, 5, 8]]
    inside = plan(StateMove(0, 14, 6, 3), decode=(3,), chunks=(Chunk(0, 12, 4),))
    assert segments(states, inside) == [[0, 1, 8, 8], [1, 2, 3, 3], [3, 2, -2, 6]]
    assert segments(states, plan(decode=(0, 3))) == [[0, 1, 6, 6], [1, 1, 8, 8]]


def test_a_reused_row_begins_without_a_state() -> None:
    states = made()
    segments(states, plan(StateMove(1, 3, 6, 0), decode=(1,), new_rows=(new(1),)))
    again = plan(StateMove(1, 0, 2, -1), chunks=(Chunk(1, 0, 3),), new_rows=(new(1),), released=(1,))
    assert segments(states, again) == [[0, 3, -1, 2]]


def test_a_replaced_beam_reads_the_state_of_its_new_parent() -> None:
    """A beam that was replaced: its row stays, its state is its new parent's."""
    states = made()
    segments(states, plan(StateMove(1, 3, 6, 0), StateMove(2, 3, 7, 0), decode=(1, 2), new_rows=(new(1), new(2))))
    assert segments(states, plan(StateMove(1, 4, 3, 7), decode=(1,))) == [[0, 1, 7, 3]]
    assert segments(states, plan(StateMove(2, 4, 7, 7), decode=(1, 2))) == [[0, 1, 3, 3], [1, 1, 7, 7]]
