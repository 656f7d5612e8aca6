from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.runtime.speculation.truth import Span, accepted, samples_of, tokens_of
from quire.runtime.worker.rows import Rows
from quire.types.step import Chunk, RowTokens, StepPlan


@pytest.mark.parametrize(
    ("held", "sampled", "truth"),
    [
        ([1, 2, 3], [3], [1, 2, 3]),  # appended already
        ([1, 2, 3], [], [1, 2, 3]),
        ([1, 7, 8], [7, 8, 9], [1, 7, 8, 9]),  # the whole draft, and one more
        ([1, 7, 8], [7, 5, 9], [1, 7, 5]),
        ([1, 7, 8], [4, 8, 9], [1, 4]),
        ([7, 8], [7, -1, 9], [7, 0]),  # a failed sample is no token
    ],
)
def test_a_row_holds_its_draft_as_far_as_it_was_sampled_and_the_first_that_differs(
    held: list[int], sampled: list[int], truth: list[int]
) -> None:
    assert accepted(np.array(held, dtype=np.int64), np.array(sampled, dtype=np.int64)) == truth


def test_samples_are_found_by_their_rows() -> None:
    chunks = (Chunk(4, 0, 3, (4, 5)), Chunk(6, 0, 8), Chunk(1, 5, 3, (1,), num_sampled=3))
    plan = StepPlan(0, decode_rows=np.array([3, 2], dtype=np.int32), chunks=chunks)
    places = samples_of(plan)
    assert places == {3: range(1), 2: range(1, 2), 4: range(2, 3), 5: range(3, 4), 1: range(4, 7)}
    assert [row for row, where in places.items() for _ in where] == plan.sample_rows.tolist()


def test_tokens_of_several_rows_are_looked_at_in_one_piece() -> None:
    rows = Rows(3, 10, 4, torch.device("cpu"))
    rows.write([RowTokens(row, 0, np.arange(row * 10, row * 10 + 6, dtype=np.int32)) for row in range(3)])
    found = tokens_of(rows, [Span(2, 1, 4), Span(0, 3, 3), Span(1, 5, 6)], torch.tensor([8, 9]))
    assert found.tolist() == [21, 22, 23, 15, 8, 9]
    assert found.dtype == torch.int64
