"""A batch of rows with different LoRA adapters, and without, computes what each merged model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_batches import check_batch
from adapter_files import SMALL, make_adapter, merged
from family_bench import BACKENDS
from family_models import FamilyCase
from tiny_models import Bench, engine_config


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FamilyCase]:
    return {}


def case_of(cases: dict[str, FamilyCase], name: str, folder: Path) -> FamilyCase:
    if name not in cases:
        cases[name] = FamilyCase(name, folder / name)
    return cases[name]


def bench_of(case: FamilyCase, attention: str, **config: Any) -> Bench:
    return Bench(case.checkpoint(), engine_config(adapters=SMALL, **config), attention=attention)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "gemma3_text", "mixtral", "gpt2", "falcon", "gemma4_text-moe", "deepseek_v3", "qwen3_next"],
)
def test_a_batch_of_adapters_computes_what_merged_models_do(
    name: str, cases: dict[str, FamilyCase], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Biases, norms after layers, matrices stored by inputs, by groups of heads, in pairs, held twice, put in order."""
    folder = tmp_path_factory.mktemp("adapters")
    case = case_of(cases, name, folder)
    first = make_adapter(folder / "first", case.model, seed=1)
    second = make_adapter(folder / "second", case.model, seed=2, rank=7, use_rslora=True)
    bench = bench_of(case, "auto")
    bench.put_adapter(2, first)
    bench.put_adapter(0, second)
    models = [merged(case.model, first), case.model, merged(case.model, second), merged(case.model, first)]
    check_batch(bench, models, [2, -1, 0, 2])


@pytest.mark.parametrize("attention", BACKENDS)
def test_every_backend_adds_the_changes_of_adapters(attention: str, tmp_path: Path) -> None:
    case = FamilyCase("llama", tmp_path / "model")
    first = make_adapter(tmp_path / "first", case.model, seed=1, only=lambda name: "q_proj" in name or "mlp" in name)
    second = make_adapter(tmp_path / "second", case.model, seed=2, rank=16)
    bench = bench_of(case, attention)
    bench.put_adapter(1, first)
    bench.put_adapter(0, second)
    check_batch(bench, [case.model, merged(case.model, first), merged(case.model, second)], [-1, 1, 0])
