"""The gate of GPU figures: what an accepted run had must not get worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.check import Change, compare, read_accepted

LOWER = ("batch1 tpot",)


def test_a_figure_may_lose_three_percent() -> None:
    accepted = {"nano": 100.0, "batch1 tpot": 2.0}
    fine = compare(accepted, {"nano": [97.5, 90.0, 110.0], "batch1 tpot": [2.04]}, ["nano", "batch1"], LOWER)
    assert not any(change.is_fault for change in fine)
    worse = compare(accepted, {"nano": [96.5], "batch1 tpot": [2.1]}, ["nano", "batch1"], LOWER)
    assert [change.is_fault for change in worse] == [True, True]
    better = compare(accepted, {"nano": [150.0], "batch1 tpot": [1.0]}, ["nano", "batch1"], LOWER)
    assert not any(change.is_fault for change in better)


def test_a_row_that_was_asked_for_and_not_measured_is_a_fault_and_others_are_left_out() -> None:
    (change,) = compare({"nano": 100.0, "prefill": 5.0}, {}, ["nano"], LOWER)
    assert change == Change("nano", 100.0, None, 1.0)
    assert change.is_fault


def test_figures_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "accepted.json"
    path.write_text(json.dumps({"model": "qwen3-0.6b", "found": {"nano": [1.0, 3.0, 2.0]}}))
    assert read_accepted(path, "qwen3-0.6b") == {"nano": 2.0}
    with pytest.raises(ValueError, match="qwen3-0.6b"):
        read_accepted(path, "llama-3.1-8b")
