"""An engine put together."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from quire.config.arguments import EngineArguments
from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.config.memory_check import DeviceMemory
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB
from quire.config.tiers import TierConfig
from quire.runtime.loading.files import ModelFiles
from quire.serving import assembly
from quire.types.errors import ConfigError
from tests.unit.config.machines import LARGE, SERVER
from tiny_models import engine_config, tiny_config


class Stop(Exception):
    """Nothing is loaded."""


@pytest.mark.parametrize(
    ("tiers", "namespace"), [(TierConfig(), ""), (TierConfig(4), ""), (TierConfig(4, "folder", 4), "ab")]
)
def test_the_weights_are_read_for_a_namespace_only_where_blocks_outlive_the_process(
    tiers: TierConfig, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EngineConfig] = []

    def executor(files: object, model: object, config: EngineConfig, **_: object) -> None:
        made.append(config)
        raise Stop

    monkeypatch.setattr(assembly, "cache_namespace", lambda *_: "ab")
    monkeypatch.setattr(assembly, "SingleExecutor", executor)
    config, files = engine_config(tiers=tiers), ModelFiles("tiny", Path("nowhere"), "hf")
    planned = assembly.PlannedEngine(files, tiny_config(), config, cast("MemoryPlan", None))
    with pytest.raises(Stop):
        planned.build("auto", lambda *_: None)
    assert made[0].cache.namespace == namespace


@pytest.mark.parametrize(("more", "level"), [(0, logging.INFO), (5 * GIB, logging.WARNING)])
def test_what_the_gpu_says_of_its_memory_is_logged_beside_the_plan(
    more: int, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = replace(SERVER, triton=True)
    config, memory = resolve_engine_config(EngineArguments(max_model_len=8_192), facts, LARGE)
    total, free = facts.cuda[0].total_memory, facts.cuda[0].free_memory
    found = DeviceMemory(total, total - memory.held - more, memory.held + more, memory.held + more)
    monkeypatch.setattr(assembly, "read_device_memory", lambda _: found)
    files = ModelFiles("large", Path("nowhere"), "hf")
    planned = assembly.PlannedEngine(files, LARGE, config, memory, free_memory=assembly.free_memory(facts, "cuda"))
    assert planned.free_memory == free
    with caplog.at_level(logging.INFO, "quire"):
        planned._check_memory(config)
    (record,) = caplog.records
    assert record.levelno == level
    assert "memory after the start" in record.message


def test_nothing_is_asked_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: str) -> DeviceMemory:
        raise AssertionError

    monkeypatch.setattr(assembly, "read_device_memory", read)
    assert assembly.free_memory(SERVER, "cpu") is None
    files = ModelFiles("tiny", Path("nowhere"), "hf")
    planned = assembly.PlannedEngine(files, tiny_config(), engine_config(), cast("MemoryPlan", None))
    planned._check_memory(planned.config)


def test_more_ranks_than_heads_are_refused_before_anything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    files = cast("ModelFiles", None)
    monkeypatch.setattr(assembly, "read_model_config", lambda _files: tiny_config())
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 7 ranks cannot share 6 query heads; set it to 6"):
        assembly.plan_engine(files, EngineArguments(tensor_parallel_size=7))
