from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from quire.config.arguments import EngineArguments, EngineSettings
from quire.config.facts import HardwareFacts
from quire.config.lengths import model_length
from quire.config.model import Experts, Heads, ModelConfig, Rope
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB, MIB
from quire.config.weight_counts import StoredLevels
from quire.runtime.models.build import count_weights
from quire.types.errors import ConfigError, DoesNotFit
from tests.unit.config.machines import LAPTOP, LARGE, SERVER, SMALL


def test_with_nothing_given_a_laptop_gets_float32_and_at_most_a_gibibyte_of_cache() -> None:
    config, plan = resolve_engine_config(EngineArguments(), LAPTOP, SMALL)
    assert (config.device.device, config.device.dtype, config.device.kv_dtype) == ("cpu", "float32", "float32")
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.scheduler.max_model_len) == (16, 64, 8_192)
    assert GIB - plan.block_bytes < plan.kv_cache <= GIB


def test_with_nothing_given_a_gpu_gets_what_its_share_of_memory_leaves() -> None:
    config, plan = resolve_engine_config(EngineArguments(), SERVER, LARGE)
    assert (config.device.device, config.device.dtype, config.scheduler.max_num_seqs) == ("cuda", "bfloat16", 256)
    assert plan.capacity == int(80 * GIB * 0.9)
    assert 0.97 * plan.capacity < plan.total <= plan.capacity


def test_a_step_is_given_as_many_tokens_as_keep_it_short_on_the_device() -> None:
    def tokens(machine: HardwareFacts, model: ModelConfig, *, offline: bool = False) -> int:
        config, _ = resolve_engine_config(EngineArguments(), machine, model, offline=offline)
        return config.scheduler.max_num_batched_tokens

    assert (tokens(LAPTOP, SMALL), tokens(SERVER, SMALL), tokens(SERVER, LARGE)) == (512, 4_096, 2_048)
    offline = [tokens(LAPTOP, SMALL, offline=True), *(tokens(SERVER, model, offline=True) for model in (SMALL, LARGE))]
    assert offline == [512, 16_384, 4_096]
    assert tokens(SERVER, replace(LARGE, experts=Experts(8, 2, 1_024)), offline=True) == 8_192
    small_gpu = replace(SERVER, cuda=(replace(SERVER.cuda[0], total_memory=24 * GIB, free_memory=23 * GIB),))
    assert tokens(small_gpu, SMALL, offline=True) == 4_096


def test_the_gpu_share_is_never_more_than_what_is_free() -> None:
    busy = replace(SERVER, cuda=(replace(SERVER.cuda[0], free_memory=40 * GIB),))
    _, plan = resolve_engine_config(EngineArguments(gpu_memory_utilization=0.9), busy, LARGE)
    assert plan.capacity == 40 * GIB


def test_a_cpu_with_bfloat16_uses_it() -> None:
    config, _ = resolve_engine_config(EngineArguments(device="cpu"), SERVER, SMALL)
    assert config.device.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "arguments", "dtype", "cpu_weights"),
    [
        ({"cpu_path": "i8mm", "bf16_dots": True}, {}, "float32", "integer"),
        ({"cpu_path": "i8mm", "bf16_dots": True}, {"cpu_weights": "float"}, "bfloat16", "float"),
        ({"cpu_path": "amx", "tile_units": True}, {}, "bfloat16", "float"),
        ({"cpu_path": "amx", "tile_units": True}, {"dtype": "float32"}, "float32", "integer"),
        ({"cpu_path": "amx", "tile_units": True}, {"cpu_weights": "integer"}, "bfloat16", "integer"),
        ({"cpu_path": None, "native_refusal": "not built"}, {}, "bfloat16", "integer"),
    ],
)
def test_a_quantized_model_on_a_cpu_with_bfloat16_runs_in_the_type_that_keeps_its_weights_as_stored(
    changes: dict[str, Any], arguments: dict[str, Any], dtype: str, cpu_weights: str
) -> None:
    levels = StoredLevels(parameters=1000, num_bytes=600, integer_bytes=600)
    given = EngineArguments(device="cpu", **arguments)
    config, _ = resolve_engine_config(given, replace(SERVER, **changes), replace(SMALL, levels=levels))
    assert (config.device.dtype, config.device.cpu_weights) == (dtype, cpu_weights)


@pytest.mark.parametrize(("quantization", "dtype"), [("int4", "float32"), ("int8", "float32"), ("fp8", "bfloat16")])
def test_so_does_one_that_is_quantized_while_it_is_loaded(quantization: str, dtype: str) -> None:
    facts = replace(SERVER, cpu_path="i8mm", bf16_dots=True)
    given = EngineArguments(device="cpu", quantization=quantization)
    assert resolve_engine_config(given, facts, SMALL)[0].device.dtype == dtype


def test_an_old_gpu_gets_float16_for_a_bfloat16_checkpoint() -> None:
    config, _ = resolve_engine_config(EngineArguments(device="cuda:1"), SERVER, SMALL)
    assert (config.device.device, config.device.dtype) == ("cuda:1", "float16")
    with pytest.raises(ConfigError, match=r"dtype.*8\.0"):
        resolve_engine_config(EngineArguments(device="cuda:1", dtype="bfloat16"), SERVER, SMALL)


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_a_dtype_may_be_named_as_elsewhere(name: str, dtype: str) -> None:
    assert resolve_engine_config(EngineArguments(dtype=name), LAPTOP, SMALL)[0].device.dtype == dtype


def test_the_longest_sequence_shrinks_to_what_the_cache_holds_when_nobody_chose_it() -> None:
    config, plan = resolve_engine_config(EngineArguments(num_kv_blocks=10), LAPTOP, SMALL)
    assert config.scheduler.max_model_len == 160
    assert plan.num_sequences == 1.0


def test_a_chosen_length_is_held_to_and_makes_the_cache_grow() -> None:
    long = replace(SMALL, rope=Rope(max_position=65_536))
    config, plan = resolve_engine_config(EngineArguments(max_model_len=65_536), LAPTOP, long)
    assert config.scheduler.max_model_len == 65_536
    assert plan.num_sequences >= 1.0
    with pytest.raises(DoesNotFit, match=r"max_model_len.*kv_cache_memory"):
        resolve_engine_config(EngineArguments(max_model_len=8_192, kv_cache_memory="64MiB"), LAPTOP, SMALL)


def test_the_default_cache_is_no_larger_than_all_sequences_can_use() -> None:
    args = EngineArguments(max_num_seqs=2, max_model_len=64)
    assert resolve_engine_config(args, LAPTOP, SMALL)[0].cache.num_blocks == 8


def test_the_cache_may_be_given_as_memory_or_as_blocks_but_not_both() -> None:
    config, plan = resolve_engine_config(EngineArguments(kv_cache_memory="100MiB"), LAPTOP, SMALL)
    assert plan.kv_cache <= 100 * MIB < plan.kv_cache + plan.block_bytes
    assert config.scheduler.max_model_len == config.cache.num_slots
    with pytest.raises(ConfigError, match=r"num_kv_blocks.*kv_cache_memory"):
        resolve_engine_config(EngineArguments(kv_cache_memory="1GiB", num_kv_blocks=4), LAPTOP, SMALL)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="model"):
        resolve_engine_config(EngineArguments(), LAPTOP, LARGE)
    with pytest.raises(DoesNotFit, match="kv_cache_memory"):
        resolve_engine_config(EngineArguments(kv_cache_memory="50GiB"), LAPTOP, SMALL)
    with pytest.raises(DoesNotFit, match="kv_cache_memory"):
        resolve_engine_config(EngineArguments(kv_cache_memory=1_000), LAPTOP, SMALL)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cpu:0"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"device": "cuda:\u00b2"}, "device"),
        ({"device": None}, "device"),
        ({"device": "cuda"}, "device.*0 CUDA devices"),
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"block_size": 16.0}, "block_size"),
        ({"block_size": None}, "block_size"),
        ({"swap_space": 1_000}, "swap_space.*lower it"),
        ({"host_cache_memory": "1000GiB"}, "host_cache_memory.*lower it"),
        ({"num_kv_blocks": -1}, "num_kv_blocks"),
        ({"max_model_len": 8_193}, "max_model_len.*8192"),
        ({"max_model_len": True}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
        ({"threads": 0}, "threads"),
        ({"enforce_eager": 1}, "enforce_eager"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        ({"quantization": "int3"}, "quantization.*fp8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype.*fp8_e4m3"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "half"}, "gpu_memory_utilization"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        resolve_engine_config(EngineArguments(**arguments), LAPTOP, SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "named"),
    [
        (replace(SMALL, heads=Heads(9, 3, 60)), "int4", "int4 needs heads of a multiple of 8 numbers.*60"),
        (replace(SMALL, heads=Heads(9, 3, 62)), "int8", "int8 needs heads of a multiple of 4 numbers.*62"),
        (replace(SMALL, heads=Heads(9, 3, 62)), "fp8", "float8 needs heads of a multiple of 4 numbers.*62"),
        (replace(SMALL, heads=Heads(9, 1, 40, latent=32)), "int8", 'int8 cannot hold latents.*use "fp8" or "auto"'),
        (replace(SMALL, heads=Heads(9, 1, 40, latent=32)), "int4", 'int4 cannot hold latents.*use "fp8" or "auto"'),
    ],
)
def test_heads_that_a_quantized_cache_cannot_hold_are_refused(
    model: ModelConfig, kv_cache_dtype: str, named: str
) -> None:
    for models in ((model,), (SMALL, model)):  # the model itself, and its draft model
        with pytest.raises(ConfigError, match=f"^kv_cache_dtype: {named}"):
            resolve_engine_config(EngineArguments(kv_cache_dtype=kv_cache_dtype), LAPTOP, *models)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_float8_is_asked_for_by_the_names_vllm_has(name: str) -> None:
    config, small = resolve_engine_config(EngineArguments(quantization="fp8", kv_cache_dtype=name), SERVER, LARGE)
    assert (config.device.dtype, config.device.quantization, config.device.kv_dtype) == ("bfloat16", "fp8", "float8")
    plain, large = resolve_engine_config(EngineArguments(), SERVER, LARGE)
    assert (plain.device.quantization, plain.device.kv_dtype) == (None, "bfloat16")
    assert small.block_bytes == large.block_bytes / 2 * (128 + 4) / 128  # with the scales of heads


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_a_gpu_that_knows_no_float8_refuses_it(setting: str) -> None:
    arguments = EngineArguments(device="cuda:1", **{setting: "fp8"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{setting}.*8.9"):
        resolve_engine_config(arguments, SERVER, SMALL)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (Rope(max_position=4_096), 4_096),
        (Rope(max_position=131_072, kind="llama3", scaling=(("factor", 8.0),)), 131_072),
        (Rope(max_position=4_096, kind="linear", scaling=(("factor", 2.0),)), 8_192),
        (
            Rope(
                max_position=32_768,
                kind="yarn",
                scaling=(("factor", 4.0), ("original_max_position_embeddings", 32_768.0)),
            ),
            131_072,
        ),
        (
            Rope(
                max_position=163_840,
                kind="yarn",
                scaling=(("factor", 40.0), ("original_max_position_embeddings", 4_096.0)),
            ),
            163_840,
        ),
    ],
)
def test_rope_scaling_is_part_of_a_models_length(rope: Rope, length: int) -> None:
    model: ModelConfig = replace(SMALL, rope=rope)
    assert model_length(model) == length


def test_the_keywords_of_a_call_are_the_fields_of_the_arguments() -> None:
    assert list(EngineSettings.__annotations__) == [field.name for field in fields(EngineArguments)]


@pytest.mark.parametrize("free", [4, 5, 6, 8, 16])
def test_a_small_machine_never_gets_an_engine_too_short_to_talk_to(free: int) -> None:
    """A model of 131,072 positions on a laptop: as long as memory allows, or refused, never a handful of tokens."""
    long = count_weights(replace(
        SMALL, hidden_size=2_048, intermediate_size=8_192, num_layers=16, vocab_size=128_256, heads=Heads(32, 8, 64),
        rope=Rope(max_position=131_072),
    ))  # fmt: skip
    laptop = replace(LAPTOP, available_memory=free * GIB, native_refusal="not built")
    if free < 6:
        with pytest.raises(DoesNotFit, match="model.*256 tokens"):
            resolve_engine_config(EngineArguments(), laptop, long)
        return
    config, plan = resolve_engine_config(EngineArguments(), laptop, long)
    assert config.scheduler.max_model_len >= 256
    assert plan.total <= plan.capacity


def test_the_size_a_refusal_names_is_enough() -> None:
    with pytest.raises(DoesNotFit) as refusal:
        resolve_engine_config(EngineArguments(max_model_len=2_000, kv_cache_memory="8MiB"), LAPTOP, SMALL)
    size = refusal.value.fix.partition("kv_cache_memory=")[2].rstrip(")")
    config, _ = resolve_engine_config(EngineArguments(max_model_len=2_000, kv_cache_memory=size), LAPTOP, SMALL)
    assert config.cache.num_slots >= 2_000


@pytest.mark.parametrize(("asked", "caches"), [(None, True), (True, True), (False, False)])
def test_prefixes_are_cached_unless_it_is_turned_off(asked: bool | None, caches: bool) -> None:
    config, _ = resolve_engine_config(EngineArguments(enable_prefix_caching=asked), LAPTOP, SMALL)
    assert config.cache.enable_prefix_caching is caches


def test_prefixes_are_not_cached_where_keys_depend_on_the_length_of_a_sequence() -> None:
    scaled = replace(SMALL, rope=Rope(max_position=2_048, kind="dynamic", scaling=(("factor", 2.0),)))
    assert not resolve_engine_config(EngineArguments(), LAPTOP, scaled)[0].cache.enable_prefix_caching
    short = EngineArguments(enable_prefix_caching=True, max_model_len=2_048)
    assert resolve_engine_config(short, LAPTOP, scaled)[0].cache.enable_prefix_caching
    with pytest.raises(ConfigError, match=r"^enable_prefix_caching.*max_model_len to 2048"):
        resolve_engine_config(EngineArguments(enable_prefix_caching=True), LAPTOP, scaled)


def test_the_share_of_a_gpu_is_a_warning_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    plain = resolve_engine_config(EngineArguments(), LAPTOP, SMALL)
    assert not caplog.records
    assert resolve_engine_config(EngineArguments(gpu_memory_utilization=0.5), LAPTOP, SMALL) == plain
    assert "gpu_memory_utilization has no effect on a CPU; kv_cache_memory" in caplog.text
