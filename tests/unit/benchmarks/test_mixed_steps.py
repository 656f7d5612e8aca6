"""Decoding while prompts are read, over a model small enough for a CPU."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import mixed_steps
from benchmarks.gpu.mixed_steps import Figures


def test_every_target_has_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mixed_steps, "QUIET_STEPS", 4)
    command = "mixed_steps --model tiny --device cpu --dtype float32 --rows 2 --context 4 --tokens-out 200 --prompt 40 "
    command += "--prompts 2 --targets 0,100000 --max-num-batched-tokens 16 --threads 1"
    monkeypatch.setattr(sys, "argv", command.split())
    mixed_steps.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["fcfs", "deadline, 100000 ms"]


def test_a_target_is_missed_if_one_token_in_a_hundred_comes_much_too_late() -> None:
    assert Figures(10.0, 5.0, 9.0, 12.5, 20.0, 1e4).is_missed
    assert not Figures(10.0, 5.0, 9.0, 11.5, 20.0, 1e4).is_missed
    assert not Figures(0.0, 5.0, 9.0, 12.5, 20.0, 1e4).is_missed  # there is none
