"""Caches that cannot fit are refused before a model is read."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arguments import EngineArguments
from quire.config.asked_memory import check_asked_memory
from quire.config.memory import PROCESS_BYTES
from quire.config.sizes import GIB, MIB
from quire.types.errors import DoesNotFit

PROCESS = PROCESS_BYTES["cpu"]
AVAILABLE = 4 * GIB


def refusal(available: int = AVAILABLE, default: str = "cpu", **settings: Any) -> DoesNotFit | None:
    try:
        check_asked_memory(EngineArguments(**settings), available, default)
    except DoesNotFit as error:
        return error
    return None


@pytest.mark.parametrize(
    ("settings", "device", "field", "fix"),
    [
        ({"kv_cache_memory": "40GiB"}, "cpu", "kv_cache_memory", f"lower it to less than {4096 - 320}MiB"),
        ({"kv_cache_memory": AVAILABLE - PROCESS + 1}, "cpu", "kv_cache_memory", "less than 3776MiB"),
        ({"kv_cache_memory": "2GiB", "tensor_parallel_size": 2}, "cpu", "kv_cache_memory", "less than 1728MiB"),
        ({"kv_cache_memory": "40GiB", "device": "cpu"}, "cuda", "kv_cache_memory", "less than 3776MiB"),
        ({"host_cache_memory": "40GiB"}, "cpu", "host_cache_memory", "less than 3776MiB"),
        ({"host_cache_memory": "3GiB", "kv_cache_memory": "1GiB"}, "cpu", "host_cache_memory", "less than 2752MiB"),
        ({"swap_space": 40}, "cpu", "swap_space", "less than 3776MiB"),
        ({"host_cache_memory": "40GiB"}, "cuda", "host_cache_memory", "less than 4096MiB"),
    ],
)
def test_a_cache_that_cannot_fit_is_refused(settings: dict[str, Any], device: str, field: str, fix: str) -> None:
    found = refusal(default=device, **settings)
    assert found is not None
    assert found.setting == field
    assert fix in found.fix
    assert "available" in found.reason


def test_the_refusal_says_what_is_needed_and_what_is_there() -> None:
    found = refusal(kv_cache_memory=40 * GIB)
    assert str(found).startswith("kv_cache_memory: 40.3 GiB are needed, 4.00 GiB are available on cpu")


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, "cpu"),
        ({"kv_cache_memory": AVAILABLE - PROCESS}, "cpu"),
        ({"kv_cache_memory": "40GiB"}, "cuda"),  # the GPU's memory is known to the engine
        ({"kv_cache_memory": "40GiB", "device": "cuda:1"}, "cpu"),
        ({"host_cache_memory": "1GiB", "kv_cache_memory": "2GiB"}, "cpu"),
        ({"num_kv_blocks": 10**9}, "cpu"),  # how large a block is depends on the model
        ({"host_cache_memory": 4 * GIB}, "cuda"),
    ],
)
def test_what_may_fit_is_left_to_the_plan(settings: dict[str, Any], device: str) -> None:
    assert refusal(default=device, **settings) is None


def test_where_there_is_no_room_at_all_no_size_is_named() -> None:
    found = refusal(available=100 * MIB, kv_cache_memory="1GiB")
    assert found is not None
    assert found.fix == "leave it out, and free memory"
