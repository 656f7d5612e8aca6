"""Settings that are checked before anything is known of the machine or the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.model import Rope
from quire.config.resolve import resolve_engine_config
from quire.types.errors import ConfigError
from tests.unit.config.machines import LAPTOP, SMALL


def test_with_nothing_given_everything_has_its_default() -> None:
    asked = read_arguments(EngineArguments())
    assert (asked.policy, asked.preemption, asked.layout, asked.eviction) == ("fcfs", "auto", "paged", "lru")
    assert not asked.tiers.enabled
    assert asked.tiers.write == "back"
    assert asked.speculation is asked.recording is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"preemption": "swap"}, 'preemption: "swap" needs host memory'),
        ({"policy": "deadline", "policy_config": {"tpot": 0}}, "policy_config: tpot must be above 0"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"quantization": "int3"}, "quantization"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"speculative_config": {"method": "luck"}}, "speculative_config.method"),
        ({"record_tokens": "hashed"}, "record_tokens"),
    ],
)
def test_what_no_machine_can_do_is_refused_without_one(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        read_arguments(EngineArguments(**arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lpm"}, "policy: 'lpm' orders requests by their cached prefixes, and {why}; use another policy"),
        (
            {"prefix_eviction": "lru"},
            "prefix_eviction: says which cached prompts are evicted first, and {why}; leave it out",
        ),
        (
            {"host_cache_memory": "1GiB", "disk_cache_path": "folder", "disk_cache_memory": "1GiB"},
            "disk_cache_path: holds cached prompts, and {why}; leave it out",
        ),
        (
            {"host_cache_memory": "1GiB", "tier_write": "through"},
            "tier_write: says when cached prompts are saved, and {why}; leave it out",
        ),
    ],
)
def test_what_means_nothing_without_a_cache_is_refused_there(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message.format(why='enable_prefix_caching is off')}$"):
        read_arguments(EngineArguments(enable_prefix_caching=False, **arguments))
    read_arguments(EngineArguments(**arguments))
    dynamic = replace(SMALL, rope=Rope(max_position=4_096, kind="dynamic", scaling=(("factor", 2.0),)))
    with pytest.raises(ConfigError, match=f"^{message.format(why='with dynamic rope scaling nothing is cached .*')}$"):
        resolve_engine_config(EngineArguments(**arguments), LAPTOP, dynamic)


def test_what_means_nothing_to_a_policy_that_shares_no_memory_is_refused_with_it() -> None:
    with pytest.raises(ConfigError, match=r"^prefix_eviction: .*, and the 'static' policy has no prefix cache; leave"):
        read_arguments(EngineArguments(policy="static", prefix_eviction="lfu"))


def test_host_memory_without_a_cache_is_for_swaps() -> None:
    assert read_arguments(EngineArguments(enable_prefix_caching=False, host_cache_memory="1GiB")).tiers.enabled
