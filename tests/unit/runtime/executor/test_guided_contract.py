"""The fake executor that the engine's tests run over holds the engine to the order of guided plans and their masks."""

from __future__ import annotations

import numpy as np
import pytest

from fake_executor import VOCAB, FakeExecutor
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, Masks, NewRow, StepPlan

WORDS, DECODE = -(-VOCAB // 32), np.array([0], dtype=np.int32)


def begun() -> FakeExecutor:
    """One row that decodes."""
    fake = FakeExecutor(num_blocks=4, block_size=8, depth=2)
    tokens = np.array([3, 4], dtype=np.int32)
    new = NewRow(0, tokens, 2, (0,), SamplingParams(), TokenRules(), sample_index=0, seed=0)
    fake.launch(StepPlan(step=0, new_rows=(new,), chunks=(Chunk(0, 0, 2, (0,)),)))
    fake.collect()
    return fake


def only(token: int, changed: bool | None = None) -> Masks:
    bits = np.zeros((1, WORDS), dtype=np.uint32)
    bits[0, token // 32] = 1 << (token % 32)
    return Masks(np.zeros(1, dtype=np.int32), bits, None if changed is None else np.array([changed]))


def guided(fake: FakeExecutor, step: int, masks: Masks | None) -> int:
    fake.launch(StepPlan(step=step, decode_rows=DECODE, guided=True))
    fake.supply_masks(masks)
    return int(fake.collect().token_ids[0])


def test_a_guided_plan_is_sampled_when_its_masks_come() -> None:
    fake = begun()
    fake.launch(StepPlan(step=1, decode_rows=DECODE, guided=True))
    assert len(fake.rows[0].tokens) == 3
    with pytest.raises(AssertionError, match="before its masks were supplied"):
        fake.collect()
    fake.supply_masks(only(7))
    assert fake.rows[0].tokens[3] == 7
    assert fake.collect().token_ids.tolist() == [7]


def test_plans_and_masks_out_of_order_are_caught() -> None:
    fake = begun()
    with pytest.raises(AssertionError, match="waits for none"):
        fake.supply_masks(None)
    with pytest.raises(AssertionError, match="a guided plan has masks"):
        fake.launch(StepPlan(step=1, decode_rows=DECODE, guided=True, masks=only(3)))
    fake.launch(StepPlan(step=1, decode_rows=DECODE, guided=True))
    with pytest.raises(AssertionError, match="waits for its masks"):
        fake.launch(StepPlan(step=2, decode_rows=DECODE))


def test_a_mask_marked_as_unchanged_is_compared_with_the_last_one() -> None:
    fake = begun()
    with pytest.raises(AssertionError, match="has had no mask yet"):
        guided(fake, 1, only(7, changed=False))
    fake = begun()
    assert guided(fake, 1, only(7)) == 7
    assert guided(fake, 2, only(7, changed=False)) == 7
    with pytest.raises(AssertionError, match="did change"):
        guided(fake, 3, only(8, changed=False))


def test_a_released_row_has_no_last_mask() -> None:
    fake = begun()
    guided(fake, 1, only(7))
    new = NewRow(0, np.array([5], dtype=np.int32), 1, (1,), SamplingParams(), TokenRules(), sample_index=0, seed=0)
    fake.launch(StepPlan(step=2, released=(0,), new_rows=(new,), chunks=(Chunk(0, 0, 1, (0,)),)))
    fake.collect()
    with pytest.raises(AssertionError, match="has had no mask yet"):
        guided(fake, 3, only(7, changed=False))
