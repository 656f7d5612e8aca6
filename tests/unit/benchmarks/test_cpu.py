"""The CPU comparison, run for real over an engine that only echoes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cpu import worker
from benchmarks.cpu.compare import Contestant, Runs, agreement, compare, summarise
from benchmarks.cpu.export import CLASSES, hugging_face_config
from benchmarks.cpu.job import Ask, Job, load_workload
from benchmarks.cpu.workloads import workloads
from benchmarks.report import table
from quire.config.model import Heads, ModelConfig, Rope
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.loading.resolve import ModelFiles
from tiny_models import tiny_config


class Echo:
    def __init__(self) -> None:
        self.versions = {"echo": "1"}

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        return [[ask.prompt_ids[: ask.max_tokens]] * ask.n for ask in asks]


def job(engine: str = "quire", **changes: object) -> Job:
    settings: dict[str, object] = {
        "model": "", "dtype": "float32", "threads": 1, "max_model_len": 64, "ttft_repeats": 1,
        "workloads": {"W1": [Ask([1, 2, 3, 4], 3), Ask([5, 6, 7, 8], 4)], "single": [Ask([9, 8, 7], 2)]},
    }  # fmt: skip
    return Job(engine=engine, **{**settings, **changes})  # type: ignore[arg-type]


def test_a_job_survives_its_way_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    job(options={"eager": True}).save(path)
    assert Job.load(path) == job(options={"eager": True})


def test_the_worker_counts_the_tokens_and_times_every_workload() -> None:
    measured = worker._measure(Echo(), "W1", job().workloads["W1"], 1)
    assert measured["output_tokens"] == 7
    assert measured["token_ids"] == [[[1, 2, 3]], [[5, 6, 7, 8]]]
    assert "ttft_s" not in measured
    assert worker._measure(Echo(), "single", [Ask([9, 8, 7], 2)], 3)["ttft_s"] > 0


def test_an_engine_that_stops_short_is_an_error_not_a_fast_engine() -> None:
    with pytest.raises(SystemExit, match=r"W1\[1\]: wanted 1 x 9 tokens, got \[4\]"):
        worker._measure(Echo(), "W1", [Ask([1, 2, 3], 2), Ask([5, 6, 7, 8], 9)], 1)


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 10e6 < worker.peak_rss_bytes() < 100e9


def test_a_contestant_that_dies_is_reported_and_not_run_again(capfd: pytest.CaptureFixture[str]) -> None:
    contestant = Contestant("broken", job(model="/no/such/model.gguf"), sys.executable)
    kept: list[str | None] = []
    runs = compare([contestant], 2, 120, lambda runs: kept.append(runs["broken"].failure))
    assert kept == [runs["broken"].failure]
    assert "there is nothing at /no/such/model.gguf" in str(runs["broken"].failure)
    assert summarise(runs)["broken"]["repeats"] == 0
    assert capfd.readouterr().err.count("round") == 1


def test_medians_are_taken_over_repeats_and_spreads_kept() -> None:
    results = [
        {
            "versions": {},
            "start_to_first_token_s": seconds,
            "peak_rss_bytes": 1,
            "workloads": {"W1": {"seconds": seconds, "token_ids": [[[1]]]}},
        }
        for seconds in (3.0, 1.0, 2.0)
    ]
    record = summarise({"quire": Runs(results)})["quire"]
    assert record["W1.seconds"] == 2.0
    assert record["W1.seconds.spread"] == (1.0, 3.0)
    assert "W1.token_ids" not in record


def test_agreement_is_the_share_of_requests_with_equal_tokens() -> None:
    def run(*ids: int) -> Runs:
        return Runs([{"workloads": {"W1": {"token_ids": [[[i]] for i in ids]}}}])

    assert agreement({"quire": run(1, 2, 3, 4), "peer": run(1, 2, 0, 4)}, "peer") == {
        "quire": {"W1": 0.75},
        "peer": {"W1": 1.0},
    }


def test_synthetic_workloads_have_the_shapes_of_the_real_ones() -> None:
    made = workloads(["W1", "single", "W2", "n8"], None, quick=False)
    assert [len(asks) for asks in made.values()] == [64, 1, 32, 4]
    assert all(32 <= len(ask.prompt_ids) <= 512 and 16 <= ask.max_tokens <= 256 for ask in made["W1"])
    assert len({tuple(ask.prompt_ids[:768]) for ask in made["W2"]}) == 1
    assert {(ask.n, ask.temperature) for ask in made["n8"]} == {(8, 1.0)}
    assert made == workloads(["W1", "single", "W2", "n8"], None, quick=False)


def test_quick_workloads_are_the_beginning_of_the_full_ones() -> None:
    full, quick = (workloads(["W1"], None, quick=quick)["W1"] for quick in (False, True))
    assert len(quick) == 16
    assert [ask.prompt_ids for ask in quick] == [ask.prompt_ids for ask in full[:16]]
    assert all(ask.max_tokens == max(4, other.max_tokens // 4) for ask, other in zip(quick, full, strict=False))


def test_workload_files_may_carry_fields_of_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('[{"id": 3, "prompt_ids": [1, 2], "max_tokens": 4, "unit_gap": 0.5}]')
    assert load_workload(path) == [Ask([1, 2], 4)]


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="unknown W9; choose from W1"):
        workloads(["W9"], None, quick=True)


def test_the_exported_config_is_read_back_by_transformers_as_the_same_model() -> None:
    transformers = pytest.importorskip("transformers")
    scaling = (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    rope = Rope(5e5, "llama3", (*scaling, ("original_max_position_embeddings", 64.0)), 512)
    config = ModelConfig("llama", 97, 16, 32, 2, Heads(4, 2, 8), rope, 1e-5, tie_word_embeddings=True, eos_ids=(2, 3))
    read = transformers.LlamaConfig(**hugging_face_config(config, "float32"))
    assert (read.hidden_size, read.num_key_value_heads, read.head_dim, read.vocab_size) == (16, 2, 8, 97)
    assert read.rope_parameters["rope_type"] == "llama3"
    assert read.rope_parameters["rope_theta"] == 5e5
    assert read.eos_token_id == [2, 3]


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_exported_config_is_read_back_by_quire_as_the_same_model(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture, tie_word_embeddings=True, bos_id=1, eos_ids=(2, 3))
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(config, "float32")))
    assert read_model_config(ModelFiles("tiny", tmp_path, "hf")) == config


def test_a_table_is_aligned_markdown() -> None:
    assert table(["name", "n"], [["a", 10], ["long name", 2]]).splitlines() == [
        "| name      |  n |",
        "|-----------|---:|",
        "| a         | 10 |",
        "| long name |  2 |",
    ]
