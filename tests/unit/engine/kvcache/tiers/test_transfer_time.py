"""How long a block takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quire.engine.kvcache.tiers.transfer_time import TransferTime
from quire.types.transfer import TransferReport


def test_before_anything_was_moved_a_bandwidth_is_assumed() -> None:
    assert TransferTime(4_000_000).seconds(1, 1) == pytest.approx(2e-3)
    assert TransferTime(0).seconds(2, 0) > 0


def test_what_was_measured_counts_and_the_latest_counts_most() -> None:
    time = TransferTime(0)
    for _ in range(30):
        time.apply_report(TransferReport(num_saved=10, save_seconds=1.0))
    assert time.seconds(1, 0) == pytest.approx(0.1)
    for _ in range(30):
        time.apply_report(TransferReport(num_saved=10, save_seconds=0.1))
    assert time.seconds(1, 0) == pytest.approx(0.01, rel=0.05)


def test_one_way_stands_for_the_other_until_that_is_measured() -> None:
    time = TransferTime(0)
    time.apply_report(TransferReport(num_saved=1, save_seconds=0.5))
    assert time.seconds(1, 1) == pytest.approx(1.0)
    time.apply_report(TransferReport(num_loaded=1, load_seconds=0.1))
    assert time.seconds(1, 1) == pytest.approx(0.6)


def test_a_link_that_nothing_is_moved_over_is_measured_ever_less_often() -> None:
    time, sampled = TransferTime(0), list[int]()
    for number in range(200):
        if time.note_recompute():
            sampled.append(number)
            time.apply_report(TransferReport(num_saved=1, save_seconds=1.0))
    assert sampled[0] == 0
    pauses = [later - earlier for earlier, later in pairwise(sampled)]
    assert pauses == sorted(pauses)
    assert len(sampled) <= 5


def test_a_link_over_which_something_was_moved_is_doubted_as_soon_as_at_first() -> None:
    time = TransferTime(0)
    for _ in range(200):
        if time.note_recompute():
            time.apply_report(TransferReport(num_saved=1, save_seconds=1.0))
    time.apply_report(TransferReport(num_saved=9, save_seconds=1.0))
    time.note_swap()
    assert sum(time.note_recompute() for _ in range(9)) == 1
