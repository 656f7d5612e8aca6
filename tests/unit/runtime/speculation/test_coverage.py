from __future__ import annotations

import numpy as np

from quire.config.engine import CacheConfig
from quire.runtime.speculation.coverage import OwnCoverage, TargetCoverage
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan


def new(row: int, blocks: tuple[int, ...], num_tokens: int = 9) -> NewRow:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return NewRow(row, tokens, num_tokens, blocks, SamplingParams(), TokenRules(), 0, 0)


def grants(*triples: tuple[int, int, int]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rows, slots, blocks = np.array(triples, dtype=np.int32).T
    return {"grant_rows": rows, "grant_slots": slots, "grant_blocks": blocks}


def coverage() -> OwnCoverage:
    return OwnCoverage(CacheConfig(4, 16), num_rows=4, max_blocks=8)


def test_nothing_is_covered_at_first_and_all_that_was_filled_afterwards() -> None:
    covered = coverage()
    covered.observe(StepPlan(0, new_rows=(new(0, ()),), **grants((0, 0, 5), (0, 1, 6), (0, 2, 7))))
    assert covered.start(0, 9, 0) == 0
    covered.fill(0, 9)
    assert covered.start(0, 10, 9) == 9
    assert covered.start(0, 10, 0) == 8  # whole blocks only


def test_a_row_that_shares_filled_blocks_computes_only_what_follows_them() -> None:
    covered = coverage()
    covered.observe(StepPlan(0, new_rows=(new(0, ()),), **grants((0, 0, 5), (0, 1, 6), (0, 2, 7))))
    covered.fill(0, 9)
    covered.observe(StepPlan(1, new_rows=(new(1, (5, 6, 7)),)))
    assert covered.start(1, 11, 0) == 8
    assert covered.start(1, 8, 0) == 4  # the newest token is computed, and its block with it


def test_a_block_that_was_given_to_another_is_not_covered_any_more() -> None:
    covered = coverage()
    covered.observe(StepPlan(0, new_rows=(new(0, ()),), **grants((0, 0, 5), (0, 1, 6))))
    covered.fill(0, 8)
    covered.observe(StepPlan(1, new_rows=(new(1, (5,)),), **grants((1, 1, 6))))
    assert covered.start(1, 9, 0) == 4


def test_a_block_that_the_target_writes_on_from_its_middle_is_not_covered_any_more() -> None:
    covered = coverage()
    covered.observe(StepPlan(0, new_rows=(new(0, ()),), **grants((0, 0, 5), (0, 1, 6))))
    covered.fill(0, 8)
    covered.observe(StepPlan(1, new_rows=(new(1, (5, 6)),), chunks=(Chunk(1, 6, 3),), **grants((1, 2, 9))))
    assert covered.start(1, 10, 0) == 4


def test_the_targets_own_cache_lacks_only_the_newest_token() -> None:
    assert TargetCoverage().start(0, 17, 3) == 16
