"""What the router learns from a replica's metrics."""

from __future__ import annotations

import pytest

from quire.serving.router.health import cache_tokens


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("quire:kv_cache_capacity_tokens 6400.0", 6_400),
        ('vllm:kv_cache_capacity_tokens{model="m"} 6.4e+3', 6_400),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0', 6_400),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0', None),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', None),
        ("other 1", None),
    ],
)
def test_the_size_of_a_cache_is_read_from_metrics(line: str, tokens: int | None) -> None:
    assert cache_tokens(f"# HELP x\n{line}\n".encode()) == tokens


@pytest.mark.parametrize("number", ["1e999", "1e30", "..", "e", "+", "1.2.3"])
def test_a_size_that_is_no_number_or_beyond_any_memory_is_ignored(number: str) -> None:
    """An exception would end the health checks of the replica."""
    assert cache_tokens(f"quire:kv_cache_capacity_tokens {number}\n".encode()) is None


def test_as_many_digits_as_python_refuses_to_read_are_ignored() -> None:
    line = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5_000}"}} 1.0\n'
    assert cache_tokens(line.encode()) is None
