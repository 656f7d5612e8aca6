"""The control-plane benchmark: its loads are what they are called, and goals are held against the right figures."""

from __future__ import annotations

from benchmarks.control_loads import Crowd, burst
from benchmarks.control_plane import beside, cost


def test_a_steady_load_decodes_every_sequence_in_every_step() -> None:
    load = Crowd(5, 4, churn=False)
    for _ in range(4):
        before = load.engine.core.stats().output_tokens
        assert load.step_ns() > 0
        assert load.engine.core.stats().output_tokens == before + 5
    assert load.engine.core.stats().finished == 0


def test_a_churning_load_ends_sequences_and_replaces_them() -> None:
    load = Crowd(5, 4, churn=True)
    stats = load.engine.core.stats()
    assert stats.finished > 0
    assert stats.running + stats.waiting == 5


def test_a_full_cache_evicts_a_block_for_every_block_that_is_taken() -> None:
    load = Crowd(5, 40, churn=True, full_cache=True)
    before = load.engine.core.stats()
    for _ in range(40):
        load.step_ns()
    after = load.engine.core.stats()
    assert after.evicted_blocks > before.evicted_blocks > 0


def test_as_many_requests_wait_as_run_where_policies_are_compared() -> None:
    stats = Crowd(5, 4, churn=True, policy="fair").engine.core.stats()
    assert (stats.running, stats.waiting) == (5, 5)


def test_a_burst_gives_a_time_for_every_step() -> None:
    own = burst(64, 4)
    assert len(own) >= 8  # every request decodes eight tokens
    assert min(own) > 0


def test_a_goal_is_held_against_the_median_or_against_a_ratio() -> None:
    one = cost("load", 64, [10_000, 20_000, 90_000], 20.0)
    assert (one.median_us, one.longest_us, one.figure, one.is_missed) == (20.0, 90.0, 20.0, False)
    assert cost("load", 64, [21_000], 20.0).is_missed
    assert not cost("load", 64, [21_000]).is_missed
    other = beside("load", 64, [26_000, 26_000], [20_000], 1.2)
    assert (other.figure, other.unit, other.is_missed) == (1.3, "x", True)
