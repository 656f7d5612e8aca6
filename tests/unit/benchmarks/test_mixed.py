"""Batches of plain requests with a grammar and a penalty among them, over a model small enough to run them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

from benchmarks import mixed
from benchmarks.preemption import TINY
from quire.types.sampling import SamplingParams

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 16}
SIZE = ("--requests", "4", "--tokens-in", "8", "--tokens-out", "6", "--repeats", "1", "--threads", "1")


def test_the_cases_take_turns_and_are_held_beside_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(mixed.SHAPES, "tiny", replace(TINY, config=TINY.config | SMALL))
    monkeypatch.setattr(sys, "argv", ["mixed", "--model", "tiny", *SIZE, "--out", str(tmp_path / "mixed.json")])
    mixed.main()
    shown = capsys.readouterr().out
    works = [line.split('"work": "')[1].split('"')[0] for line in shown.splitlines() if line.startswith("RESULT ")]
    assert works == list(mixed.CASES) * 2
    assert all(f"| {case}" in shown for case in mixed.CASES)
    assert (tmp_path / "mixed.json").exists()


def test_special_requests_are_two_of_a_batch_at_most() -> None:
    assert mixed.CASES["one of each"] == mixed.CASES["one grammar"] + mixed.CASES["one penalty"]
    grammar, penalty = (SamplingParams(**each) for each in mixed.CASES["one of each"])
    assert grammar.structured_outputs is not None
    assert penalty.repetition_penalty == 1.1


def test_shares_are_of_medians_without_the_first_round() -> None:
    rounds = {case: [1.0, 100.0, 80.0, 120.0] for case in mixed.CASES} | {"one grammar": [9.0, 95.0, 70.0, 96.0]}
    assert mixed.shares(rounds) == dict.fromkeys(mixed.CASES, 1.0) | {"one grammar": 0.95}
    line = next(line for line in mixed.rows(rounds) if line[0] == "one grammar")
    assert line == ["one grammar", "95", "95.0 %", "80.0 - 95.0 %"]


def test_one_request_is_too_few(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mixed", "--requests", "1"])
    with pytest.raises(SystemExit):
        mixed.main()
    assert "two requests and one round are the least" in capsys.readouterr().err
