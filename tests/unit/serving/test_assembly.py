"""An engine put together."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.config.tiers import TierConfig
from quire.runtime.loading.files import ModelFiles
from quire.serving import assembly
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
