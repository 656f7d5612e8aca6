"""Settings of an engine whose layers are divided into stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.memory import state_groups
from quire.config.model import Heads, ModelConfig, Rope
from quire.config.parallel import ParallelConfig
from quire.config.recurrent import Recurrent
from quire.config.speculation import SpeculationConfig
from quire.config.stages import resolve_pipeline, stage_model, stage_models
from quire.types.errors import ConfigError

MODEL = ModelConfig("llama", 100, 64, 96, 6, Heads(4, 2, 16), Rope(), 1e-5)
CONFIG = EngineConfig(
    CacheConfig(16, 64),
    SchedulerConfig(),
    DeviceConfig("cpu", "float32", "float32"),
    parallel=ParallelConfig(pipeline=2),
)


def test_there_are_as_many_micro_batches_as_stages() -> None:
    assert resolve_pipeline(CONFIG, MODEL).scheduler.micro_batches == 2
    assert resolve_pipeline(replace(CONFIG, parallel=ParallelConfig()), MODEL).scheduler.micro_batches == 1


def test_a_rank_has_the_layers_of_its_stage() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=3)
    layers = [stage_model(MODEL, parallel.place(rank)).layers for rank in range(parallel.num_ranks)]
    assert layers == [range(2), range(2), range(2, 4), range(2, 4), range(4, 6), range(4, 6)]


def test_places_in_the_cache_are_counted_within_a_stage() -> None:
    hybrid = replace(MODEL, recurrent=Recurrent(1, 1, 8, 8, 2, (0, 2, 3)))
    first, second = stage_models(hybrid, 2)
    assert [first.place_of(layer) for layer in first.layers] == [0, 0, 1]  # a state, keys, a state
    assert [second.place_of(layer) for layer in second.layers] == [0, 0, 1]  # a state, keys, keys
    assert [len(stage.kv_specs) for stage in (first, second)] == [3, 3]


def test_states_take_as_many_blocks_as_the_stage_with_the_most() -> None:
    recurrent = Recurrent(4, 4, 64, 64, 4, (0, 1, 2, 4))  # three layers of the first stage, one of the second
    hybrid = replace(MODEL, num_layers=8, recurrent=recurrent)
    whole = state_groups(hybrid, "float32", 16, 9)
    config = resolve_pipeline(replace(CONFIG, cache=replace(CONFIG.cache, groups=whole)), hybrid)
    own = [state_groups(stage, "float32", 16, 9).blocks_per_state for stage in stage_models(hybrid, 2)]
    assert config.cache.groups.num_states == 9
    assert config.cache.groups.blocks_per_state == max(own) > min(own)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (
            replace(CONFIG, speculation=SpeculationConfig(method="self_draft", num_tokens=3)),
            "speculative_config.method",
        ),
        (replace(CONFIG, parallel=ParallelConfig(pipeline=7)), "pipeline_parallel_size"),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(config: EngineConfig, setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_pipeline(config, MODEL)
    assert refusal.value.setting == setting
    assert refusal.value.fix
