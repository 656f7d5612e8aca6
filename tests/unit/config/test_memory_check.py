"""The memory plan beside what a device says after the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.memory import PROCESS_BYTES, MemoryPlan, plan_memory
from quire.config.memory_check import MOST_OFF, DeviceMemory, check_memory
from quire.config.sizes import GIB, MIB
from quire.config.speculation import SpeculationConfig
from tests.unit.config.machines import LARGE, SERVER

CAPACITY, TOTAL = 72 * GIB, 80 * GIB
CONTEXT = PROCESS_BYTES["cuda"]


def plan(**changes: object) -> MemoryPlan:
    config = EngineConfig(
        CacheConfig(16, 20_000), SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2_048, max_model_len=8_192),
        DeviceConfig("cuda", "bfloat16", "bfloat16"), **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return plan_memory(LARGE, config, replace(SERVER, triton=True), CAPACITY)


def found(held: int, *, others: int = 0, spare: int = 0) -> DeviceMemory:
    """A device on which this process holds so much, with its context, torch has some more, and others have the rest."""
    return DeviceMemory(TOTAL, TOTAL - others - held - spare, held - CONTEXT, held - CONTEXT + spare)


@pytest.mark.parametrize("others", [0, 5 * GIB])
@pytest.mark.parametrize("spare", [0, GIB])
def test_a_device_that_holds_what_was_planned_is_no_surprise(others: int, spare: int) -> None:
    planned = plan()
    free_before = TOTAL - others - CONTEXT
    for held in (planned.held, planned.held - planned.graphs):  # graphs are captured as they are needed
        check = check_memory(planned, free_before, found(held, others=others, spare=spare))
        assert check.held == held
        assert check.off == 0
        assert not check.is_off


@pytest.mark.parametrize(("more", "word"), [(3 * GIB, "more"), (-3 * GIB, "less")])
def test_a_large_difference_is_said(more: int, word: str) -> None:
    planned = plan()
    bound = planned.held if more > 0 else planned.held - planned.graphs
    check = check_memory(planned, TOTAL - CONTEXT, found(bound + more))
    assert check.off == more
    assert check.is_off
    assert f"3.00 GiB {word} than planned, 4.2 % of 72.0 GiB" in str(check)


def test_a_small_difference_is_no_warning() -> None:
    planned = plan()
    small = int(MOST_OFF * CAPACITY) - MIB
    assert not check_memory(planned, TOTAL - CONTEXT, found(planned.held + small)).is_off
    assert check_memory(planned, TOTAL - CONTEXT, found(planned.held + small + 2 * MIB)).is_off


def test_what_a_step_takes_is_not_held_between_steps() -> None:
    planned = plan()
    assert planned.held_sampling < 0.1 * planned.sampling
    steps = planned.activations + planned.sampling - planned.held_sampling + planned.masks // 2
    assert planned.held == planned.total - steps


def test_a_draft_may_have_captured_less_than_planned_too() -> None:
    drafting = plan(speculation=SpeculationConfig(method="self_draft", num_tokens=3, num_layers=8))
    check = check_memory(drafting, TOTAL - CONTEXT, found(drafting.held - drafting.graphs - drafting.draft))
    assert not check.off
