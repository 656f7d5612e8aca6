"""The KV waste benchmark: what it counts, and that it would notice a wrong count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.executors import LedgerExecutor
from benchmarks.kv_waste import replay
from benchmarks.lengths import Lengths, read_trace, synthetic_trace
from quire.config.engine import SchedulerConfig
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import BlockCopy, Chunk, NewRow, StepPlan

SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, num_prompt: int, max_tokens: int) -> NewRow:
    sampling = SamplingParams(max_tokens=max_tokens)
    return NewRow(row, np.zeros(num_prompt, dtype=np.int32), num_prompt, (), sampling, TokenRules(), 0, 0)


def test_blocks_of_one_token_waste_nothing() -> None:
    lengths = [Lengths(5 + 7 * i % 40, 3 + i) for i in range(12)]
    assert replay(lengths, 1, SCHEDULER, num_slots=1_024).paged == 1.0


def test_a_lone_request_wastes_the_rest_of_its_last_block() -> None:
    usage = replay([Lengths(6, 3)], 4, SCHEDULER, num_slots=64)
    # 6 of 8 slots after the prompt, then 7 and 8 of 8; the last token is never written
    assert usage.steps == 3
    assert usage.paged == pytest.approx((6 / 8 + 7 / 8 + 8 / 8) / 3)
    assert usage.lowest_paged == 6 / 8
    assert usage.reserved_oracle == pytest.approx((6 + 7 + 8) / 3 / 9)
    assert usage.reserved_power_of_two == pytest.approx((6 + 7 + 8) / 3 / 16)
    assert usage.reserved_maximum == pytest.approx((6 + 7 + 8) / 3 / 256)


def test_every_request_of_a_pool_too_small_for_all_still_ends() -> None:
    usage = replay([Lengths(60, 60)] * 6, 4, SCHEDULER, num_slots=320)
    assert usage.requests == 6
    assert usage.preemptions > 0
    assert usage.paged > 0.9


def test_the_ledger_books_prompts_decodes_grants_and_releases() -> None:
    ledger = LedgerExecutor()
    ledger.launch(
        StepPlan(
            step=0,
            chunks=(Chunk(3, 0, 5, (3,)),),
            new_rows=(new_row(3, 5, 4),),
            grant_rows=ints(3, 3),
            grant_slots=ints(0, 1),
            grant_blocks=ints(7, 2),
        )
    )
    assert (ledger.written, ledger.blocks, ledger.rows[3].final) == (5, 2, 9)
    assert ledger.collect().token_ids.tolist() == [0]
    ledger.launch(StepPlan(1, decode_rows=ints(3)))
    assert (ledger.written, ledger.blocks) == (6, 2)
    ledger.launch(StepPlan(2, released=(3,)))
    assert (ledger.written, ledger.blocks, ledger.rows) == (0, 0, {})


def test_the_ledger_refuses_plans_whose_rows_share_blocks() -> None:
    with pytest.raises(ValueError, match="copies blocks"):
        LedgerExecutor().launch(StepPlan(0, copies=(BlockCopy(0, 1),)))


def test_a_trace_is_read_by_its_column_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\ny,0,9\nz,12,1\n")
    assert read_trace(path) == [Lengths(374, 44), Lengths(12, 1)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="ContextTokens and GeneratedTokens"):
        read_trace(path)


def test_synthetic_lengths_have_the_medians_of_the_trace_and_depend_on_the_seed_alone() -> None:
    lengths = synthetic_trace(4_000, seed=1)
    assert np.median([pair.prompt for pair in lengths]) == pytest.approx(1_020, rel=0.1)
    assert np.median([pair.output for pair in lengths]) == pytest.approx(129, rel=0.1)
    assert lengths == synthetic_trace(4_000, seed=1)
    assert lengths != synthetic_trace(4_000, seed=2)
