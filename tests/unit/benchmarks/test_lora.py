"""The benchmark of LoRA adapters: what it writes is what the engine reads, and what it reports follows the rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.lora import ADAPTED, PLAIN, chosen_shapes, main, measure, open_model, ratios, rows, target_shapes
from benchmarks.lora import write_adapter as write
from quire import LoRARequest


def test_both_cases_run_on_adapters_that_the_benchmark_wrote(tmp_path: Path) -> None:
    options = argparse.Namespace(
        device="cpu", dtype="float32", threads=1, tokens_in=4, tokens_out=2, adapters=2, rank=3, model="tiny",
        repeats=1, seed=0, cpu_seconds=True,
    )  # fmt: skip
    with open_model(options) as llm:
        shapes, layers = target_shapes(llm), llm.model_config.num_layers
        folders = [write(tmp_path / str(seed), shapes, layers, options.rank, seed) for seed in range(2)]
        loras = [LoRARequest(folder.name, place + 1, str(folder)) for place, folder in enumerate(folders)]
        rounds = measure(llm, options, loras)
    assert [len(values) for values in rounds.values()] == [2, 2]
    assert rounds.keys() == {PLAIN, ADAPTED}


def test_the_first_round_does_not_count() -> None:
    rounds = {PLAIN: [1.0, 100.0, 200.0, 100.0], ADAPTED: [9.0, 80.0, 100.0, 70.0]}
    assert ratios(rounds) == [0.8, 0.5, 0.7]
    assert rows(rounds)[1] == [ADAPTED, "80", "70.0 %", "50.0 - 80.0 %"]


def test_targets_are_chosen_by_name_and_unknown_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"self_attn.q_proj": (4, 8), "mlp.up_proj": (4, 16)}
    assert chosen_shapes(shapes, None) == shapes
    assert chosen_shapes(shapes, "up_proj") == {"mlp.up_proj": (4, 16)}
    with pytest.raises(SystemExit, match="no k_proj"):
        chosen_shapes(shapes, "q_proj,k_proj")
    monkeypatch.setattr("sys.argv", ["lora", "--device", "nowhere"])
    with pytest.raises(SystemExit):
        main()
