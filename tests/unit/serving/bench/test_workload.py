from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quire.serving.bench.workload import Job, RandomShape, has_times, poisson, random_jobs, read_jobs, replay
from quire.types.errors import ConfigError


def test_random_jobs_have_the_shape_asked_for_and_repeat_with_their_seed() -> None:
    shape = RandomShape(input_len=20, output_len=8, spread=0.5, prefix_len=4, vocab_size=1_000)
    jobs = random_jobs(50, shape, seed=3, as_text=False)
    assert jobs == random_jobs(50, shape, seed=3, as_text=False)
    assert jobs != random_jobs(50, shape, seed=4, as_text=False)
    assert all(14 <= len(job.prompt) <= 24 and 4 <= job.max_tokens <= 8 for job in jobs)
    assert all(isinstance(job.prompt, tuple) and min(job.prompt) >= 100 and max(job.prompt) < 1_000 for job in jobs)
    assert len({job.prompt[:4] for job in jobs}) == 1
    assert len({job.prompt for job in jobs}) == 50


def test_random_text_has_a_word_per_token() -> None:
    (job,) = random_jobs(1, RandomShape(input_len=12), seed=0, as_text=True)
    assert isinstance(job.prompt, str)
    assert len(job.prompt.split()) == 12


def test_poisson_arrivals_come_at_their_rate() -> None:
    jobs = poisson([Job("p", 1)] * 4_000, rate=8.0, seed=1)
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(500, rel=0.1)
    assert {job.arrival for job in poisson(jobs, math.inf, seed=1)} == {0.0}


def test_unit_gaps_are_divided_by_the_rate() -> None:
    jobs = [Job("p", 1, unit_gap=gap) for gap in (0.5, 1.0, 2.0)]
    assert [job.arrival for job in replay(jobs, 2.0)] == [0.25, 0.75, 1.75]
    assert [job.arrival for job in replay(jobs, None)] == [0.5, 1.5, 3.5]


def test_recorded_arrivals_start_at_zero_and_stretch_to_a_rate() -> None:
    jobs = [Job("p", 1, arrival=moment) for moment in (14.0, 10.0, 12.0)]
    assert [job.arrival for job in replay(jobs, None)] == [0.0, 2.0, 4.0]
    assert [job.arrival for job in replay(jobs, 3.0)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.json", json.dumps([{"prompt_ids": [1, 2], "max_tokens": 5, "unit_gap": 0.5}, {"prompt": "hi"}])),
        ("t.jsonl", '{"prompt_token_ids": [1, 2], "output_len": 5, "unit_gap": 0.5}\n\n{"prompt": "hi"}\n'),
    ],
)
def test_json_files_hold_ids_or_text(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    jobs = read_jobs(str(path), default_max_tokens=9)
    assert jobs == [Job((1, 2), 5, unit_gap=0.5), Job("hi", 9)]
    assert has_times(jobs)


def test_a_csv_and_a_plain_text_file_are_read_too(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text('timestamp,prompt,max_tokens\n0,"a, b",3\n1.5,c,\n')
    assert read_jobs(str(table), 7) == [Job("a, b", 3), Job("c", 7, arrival=1.5)]
    lines = tmp_path / "t.txt"
    lines.write_text("first\n\nsecond\n")
    assert read_jobs(str(lines), 7) == [Job("first", 7), Job("second", 7)]
    assert not has_times(read_jobs(str(lines), 7))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "[{]",
        '[{"max_tokens": 3}]',
        '[{"prompt": "p", "max_tokens": "many"}]',
        '[{"prompt": "p", "max_tokens": -1}]',
        '[{"prompt": "p", "arrival": -1}]',
        '[{"prompt_ids": ["x"]}]',
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="workload"):
        read_jobs(str(path), 1)


@pytest.mark.parametrize("changes", [{"input_len": 0}, {"spread": 1.0}, {"vocab_size": 1}, {"prefix_len": -1}])
def test_an_impossible_shape_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RandomShape(**changes)  # type: ignore[arg-type]
