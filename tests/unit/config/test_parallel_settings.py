"""The settings of ranks: what they become, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.parallel import ParallelConfig, check_devices, check_encoder, check_together
from quire.types.errors import ConfigError


def read(**given: Any) -> ParallelConfig:
    return read_arguments(EngineArguments(**given)).parallel


def test_ranks_and_executor_are_chosen_together() -> None:
    assert read() == ParallelConfig()
    assert read(tensor_parallel_size=2, pipeline_parallel_size=3) == ParallelConfig(2, 3, executor="processes")
    assert read(executor="mp").executor == "processes"
    assert read(tensor_parallel_size=2, executor="external_launcher").executor == "torchrun"
    assert read(executor="uni").executor == "single"
    cluster = read(tensor_parallel_size=2, executor="ray", ray_address="auto", enable_expert_parallel=True)
    assert cluster == ParallelConfig(2, 1, True, "ray", ray_address="auto")
    assert read(rank_timeout=5).rank_timeout == 5.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 0}, r"^tensor_parallel_size: must be in \[1, 512\], got 0"),
        ({"tensor_parallel_size": True}, "^tensor_parallel_size: must be a whole number"),
        ({"pipeline_parallel_size": "2"}, "^pipeline_parallel_size: must be a whole number"),
        (
            {"executor": "threads"},
            "^executor: 'threads' is unknown; choose one of auto, single, processes, ray, torchrun",
        ),
        ({"executor": "single", "tensor_parallel_size": 2}, '^executor: "single" has one rank, and 2 are asked for'),
        ({"ray_address": "auto"}, '^ray_address: is for ranks in a Ray cluster; add executor="ray"'),
        ({"ray_address": "auto", "executor": "mp"}, "^ray_address: is for executor"),
        ({"ray_address": " ", "executor": "ray"}, "^ray_address: must be a text"),
        ({"enable_expert_parallel": True}, "^enable_expert_parallel: .*raise tensor_parallel_size"),
        ({"enable_expert_parallel": 1}, "^enable_expert_parallel: must be true or false"),
        ({"rank_timeout": 0.5}, r"^rank_timeout: must be in \[1, 86400\] s"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**given)


def test_every_rank_of_this_machine_needs_a_gpu() -> None:
    config = ParallelConfig(2, 2, executor="processes")
    with pytest.raises(ConfigError, match="^tensor_parallel_size: 4 ranks need as many CUDA devices, and 3 were found"):
        check_devices(config, "cuda", 3)
    check_devices(config, "cuda", 4)
    check_devices(config, "cpu", 0)
    check_devices(config, "cuda:1", 2)  # shared
    with pytest.raises(ConfigError, match="^pipeline_parallel_size: 2 ranks"):
        check_devices(ParallelConfig(1, 2, executor="processes"), "cuda", 1)


def test_what_does_not_work_with_several_ranks_is_refused() -> None:
    config = ParallelConfig(2, expert=True, executor="processes")
    check_together(config, "paged", is_mixture=True)
    with pytest.raises(ConfigError, match="^kv_layout: 'virtual' is for one rank"):
        check_together(config, "virtual", is_mixture=True)
    with pytest.raises(ConfigError, match="^enable_expert_parallel: the model has no experts"):
        check_together(config, "paged", is_mixture=False)
    check_encoder(ParallelConfig(2, executor="processes"))
    for given in (ParallelConfig(1, 2, executor="processes"), ParallelConfig(2, executor="ray")):
        with pytest.raises(ConfigError, match="encoder"):
            check_encoder(given)
