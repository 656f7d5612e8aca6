"""The settings of LoRA adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.adapters import AdapterConfig, AdapterModule, read_lora_dir, read_modules
from quire.config.arguments import EngineArguments, read_arguments
from quire.config.facts import HardwareFacts
from quire.config.memory import MemoryPlan, widest_activations
from quire.config.resolve import resolve_engine_config
from quire.types.errors import ConfigError, DoesNotFit
from tests.unit.config.machines import LAPTOP, SERVER, SMALL


def test_adapters_are_off_unless_they_are_asked_for() -> None:
    config, _ = resolve_engine_config(EngineArguments(), LAPTOP, SMALL)
    assert config.adapters is None
    assert config.scheduler.adapter_slots == 0


def test_the_scheduler_has_as_many_slots_as_the_device() -> None:
    config, _ = resolve_engine_config(EngineArguments(enable_lora=True), LAPTOP, SMALL)
    assert config.adapters == AdapterConfig(8, 16, 32)
    assert config.scheduler.adapter_slots == 8
    arguments = EngineArguments(enable_lora=True, max_loras=64, max_lora_rank=32, max_cpu_loras=100, lora_experts=True)
    config, _ = resolve_engine_config(arguments, LAPTOP, SMALL)
    assert config.adapters == AdapterConfig(64, 32, 100, experts=True)
    assert config.scheduler.adapter_slots == 64


def test_fewer_adapters_in_host_memory_than_slots_by_default_mean_fewer_slots() -> None:
    config, _ = resolve_engine_config(EngineArguments(enable_lora=True, max_cpu_loras=2), LAPTOP, SMALL)
    assert config.adapters == AdapterConfig(2, 16, 2)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_loras": 4}, "max_loras"),
        ({"max_lora_rank": 8}, "max_lora_rank"),
        ({"lora_modules": ["a=/a"]}, "lora_modules"),
        ({"lora_dir": "/"}, "lora_dir"),
        ({"enable_lora": 1}, "enable_lora"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        ({"enable_lora": True, "max_loras": True}, "max_loras"),
        ({"enable_lora": True, "max_lora_rank": 257}, "max_lora_rank"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras"),
        ({"enable_lora": True, "lora_dir": "/no/such/folder"}, "lora_dir"),
        ({"lora_experts": True}, "lora_experts"),
        ({"enable_lora": True, "lora_experts": 1}, "lora_experts"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_arguments(EngineArguments(**settings))
    assert refusal.value.setting == name


@pytest.mark.parametrize(
    "given",
    [
        ["sql=/a/sql", "chat=/a/chat"],
        ['{"name": "sql", "path": "/a/sql"}', {"name": "chat", "path": "/a/chat", "base_model_name": "x"}],
        {"sql": "/a/sql", "chat": Path("/a/chat")},
    ],
)
def test_modules_are_named_in_three_ways(given: object) -> None:
    assert read_modules(given, enable=True) == (AdapterModule("sql", "/a/sql"), AdapterModule("chat", "/a/chat"))


@pytest.mark.parametrize("given", ["a=/a", 3, ["a"], ["=/a"], ["a="], ["{"], [{"name": "a"}], ["a=/a", "a=/b"], [3]])
def test_modules_that_cannot_be_read_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="^lora_modules"):
        read_modules(given, enable=True)


def test_the_folder_of_clients_is_a_real_path(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    assert read_lora_dir(str(tmp_path / "link"), enable=True) == str(tmp_path / "here")


def test_tile_units_take_room_for_whole_tiles_of_ranks() -> None:
    tiles = replace(LAPTOP, supports_bf16=True, tile_units=True)

    def planned(rank: int, facts: HardwareFacts, **settings: Any) -> int:
        arguments = EngineArguments(enable_lora=True, max_lora_rank=rank, device="cpu", dtype="bfloat16", **settings)
        return resolve_engine_config(arguments, facts, SMALL)[1].adapters

    vectors = replace(tiles, tile_units=False)
    assert [planned(rank, tiles) for rank in (8, 32, 33, 48, 80)] == [
        planned(rank, vectors) for rank in (16, 32, 64, 64, 96)
    ]
    assert planned(48, tiles, attention_backend="reference") == planned(48, vectors)


@pytest.mark.parametrize("length", [None, 1_024])
def test_slots_that_do_not_fit_name_both_settings(length: int | None) -> None:
    arguments = EngineArguments(enable_lora=True, max_loras=1_024, max_lora_rank=256, max_model_len=length)
    with pytest.raises(DoesNotFit, match="lower max_loras, max_cpu_loras or max_lora_rank$") as refusal:
        resolve_engine_config(arguments, LAPTOP, SMALL)
    assert refusal.value.setting == "max_loras"


@pytest.mark.parametrize(("tokens", "counted"), [(256, 256), (8_192, 512)])
def test_a_gpu_has_room_for_changes_beside_the_products_of_small_steps(tokens: int, counted: int) -> None:
    arguments = EngineArguments(
        enable_lora=True, device="cuda", dtype="bfloat16", max_num_batched_tokens=tokens, max_num_seqs=64
    )
    with_triton, without = (
        resolve_engine_config(arguments, replace(SERVER, triton=each), SMALL)[1].adapters for each in (True, False)
    )
    assert with_triton - without == counted * widest_activations(SMALL) * 2


def test_adapters_in_host_memory_are_counted_with_the_largest_rank() -> None:
    def planned(facts: HardwareFacts, **settings: Any) -> MemoryPlan:
        arguments = EngineArguments(enable_lora=True, max_lora_rank=32, **settings)
        return resolve_engine_config(arguments, facts, SMALL)[1]

    few, more = (planned(LAPTOP, device="cpu", dtype="float32", max_cpu_loras=count) for count in (8, 100))
    assert few.host_adapters == 8 * 32 * SMALL.weights.adapter_width * 4
    assert more.host_adapters == 100 * 32 * SMALL.weights.adapter_width * 4
    assert more.fixed - few.fixed == more.host_adapters - few.host_adapters
    assert "host adapters" in str(more)
    beside = replace(more, device="cuda:0")
    assert more.fixed - beside.fixed == more.host_adapters
    with pytest.raises(DoesNotFit, match="host memory are needed") as refusal:
        replace(beside, host_available=more.host_adapters + more.host_masks - 1).check()
    assert refusal.value.setting == "max_cpu_loras"
    assert planned(LAPTOP, device="cpu").adapters
    off = resolve_engine_config(EngineArguments(device="cpu"), LAPTOP, SMALL)[1]
    assert off.host_adapters == 0
    assert "adapters" not in str(off)
