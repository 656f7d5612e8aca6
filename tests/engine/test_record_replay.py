"""A real model's run, recorded and decided again without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.simulator.reader import read_recording
from quire.simulator.replay import replay
from quire.simulator.what_if import Scenario
from tiny_served import write_tiny_model

PROMPTS = ["You are a poet. Write of the sea.", "You are a poet. Write of the moon.", "1, 1, 2, 3, 5, 8,", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def use(llm: LLM) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=24, seed=1))
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=12, n=2, best_of=3, seed=3, stop=["a", "e", "i"]))
    llm.beam_search(PROMPTS[2:], BeamSearchParams(beam_width=3, max_tokens=10))
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=20, temperature=0.0, stop=["\n", "o"]))
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, structured_outputs={"regex": "(ab|cd){3,5}"}))


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 14, "max_model_len": 128}, {"policy": "lpm"}])
def test_a_models_run_is_decided_again_without_it(settings: dict[str, object], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    usual: dict[str, object] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "kv_cache_memory": "4MiB"}
    if "num_kv_blocks" in settings:
        del usual["kv_cache_memory"]
    with LLM(folder, record=str(path), **usual, **settings) as llm:  # type: ignore[arg-type]
        use(llm)
    recording = read_recording(path)
    assert recording.end_reason == "closed"
    assert not recording.inexact
    result = replay(recording)
    assert result.difference is None, str(result.difference)
    assert len(result.run.outcomes) == 10
    setup = recording.setup
    run = Scenario.from_recording(recording).run("fair", setup.cache, replace(setup.scheduler, policy="fair"))
    assert [outcome.num_outputs for outcome in run.outcomes] == [each.num_outputs for each in result.run.outcomes]


def test_a_hashed_run_holds_no_text_and_is_decided_alike(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(folder, load_format="dummy", dtype="float32", threads=1, record=str(path), record_tokens="hashed") as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, seed=1))
    recording = read_recording(path)
    assert replay(recording).difference is None
    submits = list(recording.submits())
    shared = [a == b for a, b in zip(*(each.request.prompt_token_ids for each in submits[:2]), strict=False)]
    assert sum(shared) == len("You are a poet. Write of the ")
    assert min(min(each.request.prompt_token_ids) for each in submits) >= recording.setup.vocab_size
