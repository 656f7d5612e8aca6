"""The control-plane benchmark: its loads are what they are called."""

from __future__ import annotations

import pytest

from benchmarks.control_plane import Load, measure


def test_a_steady_load_decodes_every_sequence_in_every_step() -> None:
    load = Load(running=5, steps=4, churn=False)
    for _ in range(4):
        before = load.core.stats().output_tokens
        assert load.step_ns() > 0
        assert load.core.stats().output_tokens == before + 5
    assert load.core.stats().finished == 0


def test_a_churning_load_ends_sequences_and_replaces_them() -> None:
    load = Load(running=5, steps=4, churn=True)
    stats = load.core.stats()
    assert stats.finished > 0
    assert stats.running + stats.waiting == 5


@pytest.mark.parametrize("churn", [False, True])
def test_costs_are_ordered_and_the_goal_is_for_the_steady_load_only(churn: bool) -> None:
    cost = measure(64, 20, churn=churn)
    assert 0 < cost.median_us <= cost.p99_us
    assert cost.goal_us == (None if churn else 60.0)
