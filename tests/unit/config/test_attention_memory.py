from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.attention_memory import (
    EXPANDED_PAGE,
    EXPANDED_PASSES,
    SCRATCH_BYTES,
    scratch_memory,
    scratch_tokens,
)
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig, token_buckets
from quire.config.facts import CudaDevice, HardwareFacts
from quire.config.memory import TOKEN_GRAPH_BYTES, plan_memory
from quire.config.model import Heads, Latent, ModelConfig
from quire.config.sizes import GIB
from quire.config.speculation import SpeculationConfig
from tests.unit.config.machines import LARGE, SERVER, SMALL

WITH_TRITON = replace(SERVER, triton=True)
TOKEN_BYTES = 2 * 8 * 128 * 2  # of LARGE's keys and values in bfloat16


def config_of(kv_dtype: str, **scheduler: int) -> EngineConfig:
    limits = SchedulerConfig(**({"max_model_len": 8_192, "max_num_batched_tokens": 4_096} | scheduler))  # type: ignore[arg-type]
    return EngineConfig(CacheConfig(16, 2_000), limits, DeviceConfig("cuda", "bfloat16", kv_dtype))  # type: ignore[arg-type]


def copied(model: ModelConfig, config: EngineConfig, facts: object = WITH_TRITON) -> int:
    """Bytes that a quantized cache of `config` adds to the activations of a bfloat16 one."""
    plain = replace(config, device=replace(config.device, kv_dtype="bfloat16"))
    plans = [plan_memory(model, each, facts, 80 * GIB).activations for each in (config, plain)]  # type: ignore[arg-type]
    return plans[0] - plans[1]


@pytest.mark.parametrize("kv_dtype", ["float8", "int8", "int4"])
def test_a_copy_of_what_prompts_see_is_counted_on_hopper_gpus(kv_dtype: str) -> None:
    assert copied(LARGE, config_of(kv_dtype)) == 16_384 * TOKEN_BYTES
    assert copied(LARGE, config_of(kv_dtype, max_model_len=30_000)) == 30_000 * TOKEN_BYTES
    assert copied(LARGE, config_of(kv_dtype, max_num_batched_tokens=10_000)) == 20_000 * TOKEN_BYTES
    assert copied(LARGE, config_of(kv_dtype, max_model_len=131_072)) == SCRATCH_BYTES
    assert copied(LARGE, config_of(kv_dtype, max_num_seqs=1, max_model_len=1_000)) == 1_000 * TOKEN_BYTES
    other_heads = replace(LARGE, heads=Heads(32, 8, 96))
    assert copied(other_heads, config_of(kv_dtype)) == 16_384 * TOKEN_BYTES * 96 // 128


def test_there_is_none_where_prompts_read_the_cache_itself() -> None:
    config = config_of("int8")
    newer = replace(WITH_TRITON, cuda=(CudaDevice("newer", 80 * GIB, 79 * GIB, (10, 0)),))
    assert copied(LARGE, config, newer) == 0
    other_heads, all_windows = replace(LARGE, heads=Heads(32, 8, 112)), replace(LARGE, windows=(512,) * 32)
    assert copied(other_heads, config) == 0
    assert copied(all_windows, config) == 0
    mixed = replace(LARGE, windows=(512,) * 31 + (None,))
    assert copied(mixed, config) == 16_384 * TOKEN_BYTES
    assert copied(replace(mixed, local_heads=Heads(32, 4, 128)), config) == 0


LATENTS = replace(LARGE, heads=Heads(16, 1, 576, 512), latent=Latent(512, 128, 64, 128))
LATENT_BYTES = (16 * (128 + 128) + EXPANDED_PASSES * 64) * 2  # of a token's keys and values in bfloat16


def expanded(model: ModelConfig, config: EngineConfig, facts: HardwareFacts = WITH_TRITON) -> int:
    """Bytes of scratch memory for expanded latents."""
    return scratch_memory(model, config, facts, has_triton=True)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8"])
def test_keys_and_values_of_expanded_latents_are_counted_on_gpus(kv_dtype: str) -> None:
    older = replace(WITH_TRITON, cuda=(CudaDevice("older", 80 * GIB, 79 * GIB, (8, 0)),))
    for facts in (WITH_TRITON, older):
        assert expanded(LATENTS, config_of(kv_dtype), facts) == 16_384 * LATENT_BYTES
    assert expanded(LATENTS, config_of(kv_dtype, max_num_seqs=1, max_model_len=1_000)) == 1_024 * LATENT_BYTES
    longest = expanded(LATENTS, config_of(kv_dtype, max_model_len=131_072))
    assert SCRATCH_BYTES <= longest < SCRATCH_BYTES + EXPANDED_PAGE * LATENT_BYTES
    odd = replace(LATENTS, latent=Latent(512, 96, 32, 40))
    assert expanded(odd, config_of(kv_dtype)) == 16_384 * (16 * (128 + 64) + EXPANDED_PASSES * 32) * 2
    large = replace(LATENTS, latent=Latent(512, 512, 64, 128))  # heads that the kernels do not expand
    assert expanded(large, config_of(kv_dtype)) == 0
    on_cpu = config_of(kv_dtype)
    assert expanded(LATENTS, replace(on_cpu, device=replace(on_cpu.device, device="cpu"))) == 0


def test_a_drafter_has_a_copy_of_its_own() -> None:
    drafting = SpeculationConfig(method="draft_model", num_tokens=4, draft=SMALL)
    config = replace(config_of("float8"), speculation=drafting)
    plain = replace(config, device=replace(config.device, kv_dtype="bfloat16"))
    plans = [plan_memory(LARGE, each, WITH_TRITON, 80 * GIB) for each in (config, plain)]
    graphs = len(token_buckets(SMALL, config)) * TOKEN_GRAPH_BYTES
    assert plans[0].draft - plans[1].draft == scratch_tokens(SMALL, config) * 2 * 3 * 64 * 2 + graphs


def test_graphs_of_prompts_are_counted_with_and_without_a_copy() -> None:
    quantized, plain = (plan_memory(LARGE, config_of(each), WITH_TRITON, 80 * GIB) for each in ("int4", "bfloat16"))
    assert quantized.graphs - plain.graphs == len(token_buckets(LARGE, config_of("int4"))) * TOKEN_GRAPH_BYTES
