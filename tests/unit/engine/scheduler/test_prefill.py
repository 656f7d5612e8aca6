from __future__ import annotations

import pytest

from quire.engine.scheduler.prefill import chunk_size


@pytest.mark.parametrize(
    ("owed", "left", "alone", "size"),
    [
        (30, 64, False, 30),  # it fits
        (64, 64, False, 64),
        (500, 64, True, 64),  # nobody waits for the step
        (500, 64, False, 32),
        (500, 20, False, 20),  # others have taken more than half already
        (500, 0, False, 0),
    ],
)
def test_a_prompt_that_does_not_fit_takes_half_of_a_step_beside_those_who_decode(
    owed: int, left: int, alone: bool, size: int
) -> None:
    assert chunk_size(owed, left, 64, alone=alone) == size


def test_a_budget_of_one_token_is_still_handed_out() -> None:
    assert chunk_size(5, 1, 1, alone=False) == 1
