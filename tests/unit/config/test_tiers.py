"""The tiers' settings: from bytes to blocks, and what cannot be had together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.arguments import EngineArguments
from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB, MIB
from quire.config.tiers import TierConfig
from quire.types.errors import ConfigError, DoesNotFit
from tests.unit.config.machines import LAPTOP, LARGE, SERVER, SMALL

DISK = {"host_cache_memory": "64MiB", "disk_cache_memory": "1GiB"}


def resolve(**settings: Any) -> tuple[EngineConfig, MemoryPlan]:
    return resolve_engine_config(EngineArguments(**settings), LAPTOP, SMALL)


def test_there_are_no_tiers_unless_somebody_asks() -> None:
    config, plan = resolve()
    assert config.cache.tiers == TierConfig()
    assert not config.cache.tiers.enabled
    assert config.scheduler.preemption == "auto"
    assert plan.host_cache == 0


def test_sizes_become_blocks(tmp_path: Any) -> None:
    config, plan = resolve(
        host_cache_memory="256MiB", disk_cache_path=str(tmp_path), disk_cache_memory="1GiB", tier_write="through"
    )
    tiers = config.cache.tiers
    assert tiers.host_blocks == 256 * MIB // plan.block_bytes
    assert tiers.disk_blocks == GIB // plan.block_bytes
    assert (tiers.disk_path, tiers.write, tiers.block_bytes) == (str(tmp_path), "through", plan.block_bytes)
    assert plan.host_cache == tiers.host_blocks * plan.block_bytes


def test_the_sizes_are_those_of_a_rank() -> None:
    """Of two ranks, one has two of three heads of all layers; of two stages, each has half of the layers."""
    whole, shared, staged = (
        resolve(host_cache_memory="64MiB", num_kv_blocks=64, **ranks)[0].cache.tiers
        for ranks in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
    )
    assert [each.block_bytes for each in (shared, staged)] == [whole.block_bytes * 2 // 3, whole.block_bytes // 2]
    assert [each.host_blocks for each in (shared, staged)] == [
        64 * MIB // each.block_bytes for each in (shared, staged)
    ]
    assert staged.host_blocks == 2 * whole.host_blocks


def test_a_folder_may_be_given_as_a_path(tmp_path: Path) -> None:
    assert resolve(**DISK, disk_cache_path=tmp_path)[0].cache.tiers.disk_path == str(tmp_path)


def test_swap_space_is_host_memory_in_gibibytes() -> None:
    assert resolve(swap_space=0.5)[0].cache.tiers == resolve(host_cache_memory="512MiB")[0].cache.tiers
    assert not resolve(swap_space=0)[0].cache.tiers.enabled


@pytest.mark.parametrize("name", ["auto", "swap", "recompute"])
def test_a_way_to_preempt_can_be_chosen(name: str) -> None:
    assert resolve(preemption=name, host_cache_memory="64MiB")[0].scheduler.preemption == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption": "throw"}, "preemption: 'throw' is unknown; use one of auto, swap, recompute"),
        ({"preemption": "swap"}, 'preemption: "swap" needs host memory; set host_cache_memory='),
        ({"host_cache_memory": "1KiB"}, "host_cache_memory: 1.00 KiB hold no block: one takes .*; raise it"),
        ({"host_cache_memory": "lots"}, "host_cache_memory: 'lots' is not a size"),
        ({"host_cache_memory": "1GiB", "swap_space": 1}, "swap_space: cannot be given together with host_cache_memory"),
        ({"swap_space": -1}, "swap_space: must be a number of GiB, got -1"),
        ({"swap_space": True}, "swap_space: must be a number of GiB"),
        ({"disk_cache_memory": "1GiB"}, "disk_cache_path: is missing"),
        ({"disk_cache_path": "folder"}, "disk_cache_memory: is missing"),
        ({"disk_cache_path": "", "disk_cache_memory": "1GiB"}, "disk_cache_path: must be the path of a folder"),
        (
            {"disk_cache_path": "folder", "disk_cache_memory": "1GiB"},
            "disk_cache_path: needs host_cache_memory: .*; set host_cache_memory=",
        ),
        (
            {"host_cache_memory": "64MiB", "disk_cache_path": "folder", "disk_cache_memory": "1KiB"},
            "disk_cache_memory: 1.00 KiB hold no block",
        ),
        ({"tier_write": "never"}, "tier_write: 'never' is unknown"),
        ({"tier_write": "through"}, "tier_write: has no effect without host_cache_memory; add that, or leave it out"),
        ({"tier_write": "back", "swap_space": 0}, "tier_write: has no effect without host_cache_memory"),
        ({"swap_space": 1e-12}, "swap_space: 1 B hold no block"),
        ({**DISK, "disk_cache_path": "~nosuchuser/x"}, "disk_cache_path: there is no home for '~nosuchuser/x'; write"),
        ({**DISK, "disk_cache_path": "a\0b"}, r"disk_cache_path: must be the path of a folder, got 'a\\x00b'"),
        ({**DISK, "disk_cache_path": 7}, "disk_cache_path: must be the path of a folder, got 7"),
        ({"host_cache_memory": "64MiB", "policy": "orca-max"}, "host_cache_memory: .*'orca-max' policy"),
        ({"host_cache_memory": "64MiB", "kv_layout": "virtual"}, 'host_cache_memory: .*kv_layout "virtual"'),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**settings)


def test_a_host_tier_that_leaves_a_cpu_no_room_for_a_sequence_is_named_with_the_size_that_would_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"host_cache_memory: not even 256 tokens fit beside 11.9 GiB of it") as caught:
        resolve(host_cache_memory="12200MiB")
    lowered = caught.value.fix.split()[3]
    assert caught.value.fix == f"lower it to {lowered} or less"
    assert resolve(host_cache_memory=lowered)[1].num_sequences >= 1


def test_more_host_memory_than_there_is_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="host_cache_memory"):
        resolve_engine_config(EngineArguments(host_cache_memory="900GiB", max_model_len=512), SERVER, LARGE)
