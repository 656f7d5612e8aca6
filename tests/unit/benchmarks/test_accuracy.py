"""The accuracy benchmark's arithmetic, and its engines on a tiny model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import accuracy
from benchmarks.gpu.accuracy import Parting, Reading, compare, find_parting
from quire.types.output import Logprob
from tiny_served import write_tiny_model


def line(**logprobs: float) -> dict[int, Logprob]:
    return {int(token[1:]): Logprob(value) for token, value in logprobs.items()}


def test_perplexity_and_errors_follow_from_the_logprobs() -> None:
    wanted = Reading([1, 2], [line(t1=-1.0, t5=-2.0), line(t2=-3.0)], [], [])
    found = Reading([1, 2], [line(t1=-1.5, t7=-0.1), line(t2=-2.5)], [], [])
    assert wanted.perplexity == pytest.approx(math.exp(2.0))
    figures = compare(found, wanted)
    assert (figures.mean_error, figures.max_error, figures.partings) == (0.5, 0.5, ())


def test_answers_part_where_they_first_differ() -> None:
    lines = [line(t1=-0.5), line(t2=-0.5, t3=-0.75), line(t4=-0.1)]
    assert find_parting([1, 2, 4], [1, 2, 4], lines) is None
    assert find_parting([1, 3, 9], [1, 2, 4], lines) == Parting(1, 0.25)
    assert find_parting([1, 2, 9], [1, 2, 4], lines) == Parting(2, math.inf)


def test_an_engine_reads_the_documentation_and_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "WINDOW", 30)
    model = write_tiny_model(tmp_path, max_length=128)
    options = argparse.Namespace(tokens=70, prompts=2, answer=4)
    dummy = {"load_format": "dummy", "threads": 1, "device": "cpu"}
    wanted = accuracy.measure(str(model), accuracy.REFERENCE | dummy, options)
    found = accuracy.measure(str(model), accuracy.ENGINES["fp8 weights and cache"] | dummy, options)
    assert (len(wanted.tokens), [len(answer) for answer in wanted.answers]) == (67, [4, 4])
    figures = compare(found, wanted)
    assert figures.mean_error is not None
    assert figures.mean_error < 0.05
    assert figures.perplexity == pytest.approx(wanted.perplexity, rel=0.05)
    assert accuracy.row("fp8", figures, 2)[0] == "fp8"
