"""How long known tokens are estimated to take to compute, and how a ledger shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from quire.engine.decoding.group import Group
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.preemption import Recompute
from quire.engine.scheduler.step_time import ComputeTime, StepCurve
from quire.types.step import Chunk, StepPlan
from quire.types.transfer import SlotMove, Transfers


def prompt(num_tokens: int, transfers: Transfers = Transfers()) -> StepPlan:  # noqa: B008 - it is frozen
    return StepPlan(0, chunks=(Chunk(0, 0, num_tokens),), transfers=transfers)


def decode(rows: int) -> StepPlan:
    return StepPlan(0, decode_rows=np.arange(rows, dtype=np.int32))


def test_nothing_is_known_before_the_first_step() -> None:
    assert ComputeTime().seconds(100) is None


def test_the_base_of_a_step_is_not_the_tokens_cost() -> None:
    compute = ComputeTime()
    for _ in range(20):
        compute.note_step(prompt(500), 500, 0.010 + 500 * 1e-4)
        compute.note_step(decode(8), 8, 0.010 + 8 * 1e-4)
    assert compute.seconds(1_000) == pytest.approx(0.1, rel=0.01)


def test_many_decode_steps_do_not_drown_a_few_prompts() -> None:
    compute = ComputeTime()
    compute.note_step(prompt(500), 500, 0.060)
    for _ in range(1_000):
        compute.note_step(decode(8), 8, 0.0108)
    assert compute.seconds(1_000) == pytest.approx(0.1, rel=0.01)


def test_a_step_that_also_moved_blocks_says_nothing() -> None:
    compute = ComputeTime()
    compute.note_step(prompt(500), 500, 0.05)
    compute.note_step(prompt(500, Transfers(saves=(SlotMove(0, 0),))), 500, 5.0)
    assert compute.seconds(500) == pytest.approx(0.05)


# ------------------------------------------------------------------------------------------------------- StepCurve
def curve(*sizes: int) -> StepCurve:
    """After some steps of each size, of 8 ms and a hundredth for each token."""
    found = StepCurve()
    for size in sizes:
        for _ in range(4):
            found.note(size, 0.008 + 1e-5 * size)
    return found


def test_before_the_first_step_there_is_no_bound() -> None:
    assert StepCurve().tokens_within(0.001, 512) == 512


def test_a_step_takes_as_many_tokens_as_end_within_the_time() -> None:
    assert curve(64, 512, 2048).tokens_within(0.020, 8192) == pytest.approx(1_200, rel=0.02)
    assert curve(64, 512, 2048).tokens_within(0.020, 1000) == 1000
    assert curve(64, 512).tokens_within(0.020, 8192) == pytest.approx(1_200, rel=0.02)  # beyond what is known


def test_long_decoding_does_not_make_it_forget_what_prompts_cost() -> None:
    found = curve(64, 512, 2048)
    for _ in range(10_000):
        found.note(64, 0.008 + 1e-5 * 64)
    assert found.tokens_within(0.020, 8192) == pytest.approx(1_200, rel=0.02)


def test_where_a_bare_step_is_too_long_nothing_is_added() -> None:
    assert curve(64, 512).tokens_within(0.004, 8192) < 64


def test_what_is_far_from_all_steps_so_far_is_not_trusted() -> None:
    found = curve(64)
    found.note(80, 0.008)  # no dearer, by chance
    assert found.tokens_within(1.0, 8192) <= 4 * 80


@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_compiled_kernels_soon_counts_for_nothing(first: bool) -> None:
    found = StepCurve() if first else curve(64, 512, 2048)
    for size in (64, 512, 2048):
        found.note(size, 3.0)
        for _ in range(12):
            found.note(size, 0.008 + 1e-5 * size)
    assert found.tokens_within(0.020, 8192) == pytest.approx(1_200, rel=0.05)


@pytest.mark.parametrize("limit", [2_048, 8_192])
def test_slow_first_steps_of_every_size_do_not_hold_the_budget_down(limit: int) -> None:
    """Each step is as large as the ones before allow."""
    found, met = StepCurve(), set[int]()
    for _ in range(300):
        size = max(64 + limit // 32, found.tokens_within(0.045, limit))
        key = size.bit_length()
        found.note(size, 0.020 + 2e-5 * size + (0.0 if key in met else 1.0))
        met.add(key)
    assert found.tokens_within(0.045, limit) == pytest.approx(1_250, rel=0.05)


def test_it_follows_a_machine_that_becomes_faster() -> None:
    found = curve(64, 512, 2048)
    for _ in range(60):
        size = found.tokens_within(0.020, 8192)
        found.note(size, 0.004 + 0.5e-5 * size)
    assert found.tokens_within(0.020, 8192) > 2_000


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.000_012_34, "0.0123 ms"), (0.0126, "12.6 ms"), (0.0999, "100 ms"), (0.999_9, "1,000 ms"), (4.6, "4,600 ms")],
)
def test_a_ledger_shows_whole_milliseconds_from_a_hundred_on(seconds: float, shown: str) -> None:
    class Known(ComputeTime):
        def seconds(self, num_tokens: int) -> float:
            return seconds

    nobody = cast("Group", SimpleNamespace(live=()))
    assert Recompute(Known()).free_blocks(nobody, cast("PlanBuilder", None), 1) == f"recompute est. {shown}"
