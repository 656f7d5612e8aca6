from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.attention_memory import scratch_memory
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.facts import HardwareFacts
from quire.config.memory import (
    GATHERED_BYTES,
    LOAD_STAGING_BYTES,
    SAVE_STAGING_BYTES,
    MemoryPlan,
    kv_block_bytes,
    plan_memory,
)
from quire.config.model import Dtype, Experts, Heads, Latent, Quantization
from quire.config.parallel import ParallelConfig
from quire.config.sampling_memory import MASK_PARCELS, PROMPT_POSITIONS
from quire.config.sizes import GIB, MIB
from quire.config.tiers import TierConfig
from quire.config.weight_counts import StoredLevels
from quire.config.weight_memory import weight_memory
from quire.runtime.models.build import count_weights
from quire.types.errors import DoesNotFit
from tests.unit.config.machines import LAPTOP, LARGE, SERVER, SMALL


def _plan(dtype: Dtype = "float32", *, num_blocks: int = 1_000, capacity: int = 12 * GIB) -> MemoryPlan:
    config = EngineConfig(
        CacheConfig(block_size=16, num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2_048),
        DeviceConfig("cpu", dtype, dtype),
    )
    return plan_memory(SMALL, config, LAPTOP, capacity)


def test_weights_are_counted_in_the_bytes_they_are_held_in() -> None:
    parameters = SMALL.num_parameters
    assert _plan("float32").weights == 4 * parameters
    assert _plan("bfloat16").weights == 4 * parameters  # held as float32: this CPU cannot multiply bfloat16
    on_server = plan_memory(
        replace(SMALL, tie_word_embeddings=False),
        EngineConfig(CacheConfig(16, 10), SchedulerConfig(), DeviceConfig("cuda", "bfloat16", "bfloat16")),
        SERVER,
        80 * GIB,
    )
    assert on_server.weights == 2 * replace(SMALL, tie_word_embeddings=False).num_parameters


def test_a_tied_embedding_counts_twice_where_the_head_is_repacked() -> None:
    config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), DeviceConfig("cpu", "bfloat16", "bfloat16"))
    repacked = plan_memory(SMALL, config, SERVER, 80 * GIB)
    assert repacked.weights == 2 * (SMALL.num_parameters + SMALL.vocab_size * SMALL.hidden_size)


@pytest.mark.parametrize("triton", [True, False])
def test_quantized_weights_are_small_where_triton_multiplies_by_them(triton: bool) -> None:
    device = DeviceConfig("cuda", "bfloat16", "float8", quantization="fp8")
    config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), device)
    found = plan_memory(LARGE, config, replace(SERVER, triton=triton), 80 * GIB).weights
    numbers, outputs = LARGE.layer_weights
    rest = LARGE.num_parameters - numbers
    assert numbers == 32 * (4_096 * (6_144 + 4_096) + 3 * 4_096 * 14_336)
    assert outputs == 32 * (6_144 + 4_096 + 28_672 + 4_096)
    assert found == (numbers + 4 * outputs + 2 * rest if triton else 2 * LARGE.num_parameters)


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [("float8", 64 + 4), ("int8", 64 + 4), ("int4", 32 + 2 * 4)])
def test_blocks_of_a_quantized_cache_hold_their_scales(kv_dtype: str, head_bytes: int) -> None:
    plans = []
    for dtype, backend in (("float32", "auto"), (kv_dtype, "auto"), (kv_dtype, "gather")):
        device = DeviceConfig("cpu", "float32", dtype, attention_backend=backend)  # type: ignore[arg-type]
        plans.append(plan_memory(SMALL, EngineConfig(CacheConfig(16, 10), SchedulerConfig(), device), LAPTOP, GIB))
    plain, native, gathered = plans
    assert plain.block_bytes * head_bytes == native.block_bytes * 4 * SMALL.heads.dim
    assert native.activations == plain.activations
    assert gathered.activations > plain.activations


def test_the_plan_counts_with_the_runtimes_own_limits() -> None:
    from quire.runtime import transfer
    from quire.runtime.attention.gather import GROUP_BYTES
    from quire.runtime.worker.prompt_logprobs import AT_ONCE

    assert all(GATHERED_BYTES[device] >= size for device, size in GROUP_BYTES.items())
    assert PROMPT_POSITIONS >= AT_ONCE
    assert MASK_PARCELS >= transfer._SLOTS


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert kv_block_bytes(SMALL, "bfloat16", 16) == 2 * 30 * 3 * 64 * 2 * 16
    assert _plan().kv_cache == 1_000 * 2 * 30 * 3 * 64 * 4 * 16


def test_latents_take_one_vector_for_each_token_and_room_for_parts_on_a_gpu() -> None:
    latents = replace(SMALL, heads=Heads(16, 1, 576, 512), latent=Latent(512, 128, 64, 128))
    assert kv_block_bytes(latents, "bfloat16", 16) == 30 * 576 * 2 * 16
    apart = replace(SMALL, heads=Heads(16, 1, 576))
    config = EngineConfig(
        CacheConfig(16, 200), SchedulerConfig(max_model_len=2_048), DeviceConfig("cuda:0", "bfloat16", "bfloat16")
    )
    with_triton = replace(SERVER, triton=True)
    more = [plan_memory(model, config, with_triton, 80 * GIB).activations for model in (latents, apart)]
    parts = (80 - 48) * MIB + config.scheduler.num_rows * 16 * (512 - 576) * 4  # large heads take room for parts too
    assert more[0] - more[1] == parts + scratch_memory(latents, config, with_triton, has_triton=True)


def test_a_second_kind_of_heads_takes_room_for_parts_on_a_gpu() -> None:
    one = replace(SMALL, heads=Heads(16, 1, 256), windows=(512,) * 25 + (None,) * 5)
    two = replace(one, local_heads=Heads(16, 1, 128))
    config = EngineConfig(
        CacheConfig(16, 200), SchedulerConfig(max_model_len=2_048), DeviceConfig("cuda:0", "bfloat16", "bfloat16")
    )
    more = [plan_memory(model, config, replace(SERVER, triton=True), 80 * GIB).activations for model in (two, one)]
    assert more[0] - more[1] == 48 * MIB + config.scheduler.num_rows * 16 * 256 * 4


def test_the_plan_says_how_many_full_sequences_fit() -> None:
    assert _plan(num_blocks=1_280).num_sequences == 10.0  # 128 blocks each
    assert "holds 10.0 sequences of 2,048 tokens" in str(_plan(num_blocks=1_280))


def test_the_printed_table_is_aligned_and_ends_with_the_total() -> None:
    lines = str(_plan()).splitlines()
    assert lines[0] == "memory plan"
    assert lines[-2].split()[0] == "total"
    columns = {line.index("iB") for line in lines[1:-1]}
    assert len(columns) == 1


def test_a_cache_too_small_for_one_sequence_is_refused_with_both_ways_out() -> None:
    with pytest.raises(DoesNotFit, match=r"max_model_len.*1600 or less.*kv_cache_memory"):
        _plan(num_blocks=100).check()


def test_a_cache_that_does_not_fit_is_refused_with_the_size_that_would() -> None:
    fixed = _plan().fixed
    with pytest.raises(DoesNotFit, match=r"kv_cache_memory.*lower it to 200MiB"):
        _plan(capacity=fixed + 200 * MIB).check()


def test_a_model_that_does_not_fit_at_all_is_refused_as_such() -> None:
    config = EngineConfig(
        CacheConfig(16, 200), SchedulerConfig(max_model_len=2_048), DeviceConfig("cpu", "float32", "float32")
    )
    with pytest.raises(DoesNotFit, match=r"^model.*weights.*smaller model"):
        plan_memory(LARGE, config, LAPTOP, LAPTOP.available_memory).check()


def test_buffers_larger_than_the_model_name_the_budget_to_lower() -> None:
    config = EngineConfig(
        CacheConfig(16, 200),
        SchedulerConfig(max_num_seqs=4_096, max_num_batched_tokens=65_536, max_model_len=2_048),
        DeviceConfig("cpu", "float32", "float32"),
    )
    with pytest.raises(DoesNotFit, match=r"^max_num_batched_tokens.*lower it"):
        plan_memory(SMALL, config, LAPTOP, GIB).check()


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_weights_are_counted_as_such_for_float32_rows_of_the_native_kernels(tied: bool) -> None:
    model = count_weights(replace(SMALL, dtype="bfloat16", tie_word_embeddings=tied))

    def weights(dtype: Dtype, facts: HardwareFacts) -> int:
        config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), DeviceConfig("cpu", dtype, dtype))
        return plan_memory(model, config, facts, 80 * GIB).weights

    native, table = replace(LAPTOP, cpu_path="avx2"), model.vocab_size * model.hidden_size
    assert weights("float32", LAPTOP) == 4 * model.num_parameters
    in_halves = model.layer_weights[0] + (0 if tied else table)
    assert weights("float32", native) == 4 * model.num_parameters - 2 * in_halves
    assert weights("bfloat16", LAPTOP) == 4 * model.num_parameters
    assert weights("bfloat16", native) == 2 * (model.num_parameters + (table if tied else 0))


def test_an_untied_head_is_counted_in_full_where_stages_may_have_none() -> None:
    model = count_weights(replace(SMALL, dtype="bfloat16", tie_word_embeddings=False))
    device, facts = DeviceConfig("cpu", "float32", "float32"), replace(LAPTOP, cpu_path="avx2")

    def weights(parallel: ParallelConfig) -> int:
        config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), device, parallel=parallel)
        return weight_memory(model, config, facts, has_triton=False)

    table = model.vocab_size * model.hidden_size
    assert weights(ParallelConfig(pipeline=2)) == weights(ParallelConfig()) + 2 * table


def test_levels_are_counted_as_they_are_kept() -> None:
    table = SMALL.vocab_size * SMALL.hidden_size * 36 // 32
    levels = StoredLevels(parameters=1_000, num_bytes=600, integer_bytes=640, table_bytes=table)
    stored = replace(SMALL, levels=levels)

    def weights(dtype: Dtype, facts: HardwareFacts, *, integer: bool = False) -> int:
        device = DeviceConfig("cpu", dtype, dtype, cpu_weights="integer" if integer else "float")
        config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), device)
        return plan_memory(stored, config, facts, 80 * GIB).weights

    numbers = SMALL.num_parameters - 1_000
    assert weights("float32", replace(LAPTOP, native_refusal=None, level_panels=True)) == 4 * numbers + 600 + table
    assert weights("float32", replace(LAPTOP, native_refusal=None)) == 4 * SMALL.num_parameters + table
    assert weights("float32", replace(LAPTOP, native_refusal=None), integer=True) == 4 * numbers + 640
    assert weights("float32", replace(LAPTOP, native_refusal="not built"), integer=True) == 4 * SMALL.num_parameters
    assert weights("float32", replace(LAPTOP, native_refusal="not built")) == 4 * SMALL.num_parameters
    on_tiles = weights("bfloat16", replace(SERVER, native_refusal=None, tile_units=True))
    assert on_tiles == 2 * numbers + 600 + table
    in_whole_numbers = weights("bfloat16", replace(SERVER, native_refusal=None, tile_units=True), integer=True)
    assert in_whole_numbers == 2 * numbers + 640
    in_halves = weights("float16", replace(SERVER, native_refusal=None, tile_units=True))
    assert in_halves > 2 * SMALL.num_parameters, "no kernel multiplies halves by levels"


def test_checkpoints_that_are_quantized_are_counted_as_they_are_held() -> None:
    """Their embedding is plain: in halves, a tied head has a copy of its own."""
    levels = StoredLevels(1_000, 600, gpu_parameters=900, gpu_bytes=500, gpu_is_float8=True, has_table=False)
    stored = replace(SMALL, quantization="gptq", levels=levels)

    def weights(device: str, dtype: Dtype, facts: HardwareFacts) -> int:
        config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), DeviceConfig(device, dtype, dtype))
        return plan_memory(stored, config, facts, 80 * GIB).weights

    table = SMALL.vocab_size * SMALL.hidden_size
    native, numbers = replace(SERVER, native_refusal=None, tile_units=True, triton=True), SMALL.num_parameters
    assert weights("cpu", "float32", replace(LAPTOP, level_panels=True)) == 4 * (numbers - 1_000) + 600
    assert weights("cpu", "bfloat16", native) == 2 * (numbers - 1_000 + table) + 600
    stored = replace(stored, levels=replace(levels, integer_bytes=640))
    assert weights("cpu", "bfloat16", native) == 2 * (numbers - 1_000 + table) + 640
    assert weights("cpu", "float32", native) == 4 * (numbers - 1_000) + 640
    assert weights("cuda", "bfloat16", native) == 2 * (numbers - 900) + 500
    assert weights("cuda", "bfloat16", replace(native, triton=False)) == 2 * numbers
    older = replace(native, cuda=tuple(replace(device, capability=(8, 0)) for device in native.cuda))
    assert weights("cuda", "bfloat16", older) == 2 * numbers, "it multiplies no float8"


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_are_counted_with_their_scales(quantization: Quantization, bits: int) -> None:
    numbers, outputs = LARGE.layer_weights
    rest = LARGE.num_parameters - numbers
    facts = replace(SERVER, triton=True, native_refusal=None, tile_units=True)

    def weights(device: str) -> int:
        made = DeviceConfig(device, "bfloat16", "bfloat16", quantization=quantization)
        return plan_memory(LARGE, EngineConfig(CacheConfig(16, 10), SchedulerConfig(), made), facts, 800 * GIB).weights

    scales = 4 * outputs if bits == 8 else 4 * numbers // 64
    assert weights("cuda") == 2 * rest + numbers * bits // 8 + scales
    head = LARGE.vocab_size * LARGE.hidden_size if LARGE.tie_word_embeddings else 0
    assert weights("cpu") == 2 * (rest + head) + numbers // 32 * {8: 34, 4: 20}[bits]  # int8 has no offsets


@pytest.mark.parametrize(("inputs", "per_weight"), [(1_568, 0.5 + 4 / 32), (1_552, 1 + 4 / 16), (1_544, 2.0)])
def test_int4_groups_smaller_than_64_are_counted_as_a_gpu_holds_them(inputs: int, per_weight: float) -> None:
    """Groups of 32; of 16, which are held in bytes; of 8, which are expanded."""
    model = count_weights(replace(SMALL, intermediate_size=inputs))
    made = DeviceConfig("cuda", "bfloat16", "bfloat16", quantization="int4")
    config = EngineConfig(CacheConfig(16, 10), SchedulerConfig(), made)
    found = plan_memory(model, config, replace(SERVER, triton=True), 80 * GIB).weights
    numbers, odd = model.layer_weights[0], SMALL.num_layers * SMALL.hidden_size * inputs
    assert SMALL.hidden_size % 64 == 0
    assert found == 2 * (model.num_parameters - numbers) + (numbers - odd) * (0.5 + 4 / 64) + odd * per_weight


def test_graphs_are_counted_where_steps_are_captured_and_nothing_is_gathered_there() -> None:
    """Without Triton, attention gathers keys and values instead, and nothing can be captured."""
    scheduler = SchedulerConfig(max_num_seqs=256)

    def plan(**device: object) -> MemoryPlan:
        with_triton = replace(SERVER, triton=bool(device.pop("triton", True)))
        on_gpu = replace(DeviceConfig("cuda", "bfloat16", "bfloat16"), **device)
        return plan_memory(LARGE, EngineConfig(CacheConfig(16, 10), scheduler, on_gpu), with_triton, 80 * GIB)

    captured = plan()
    assert captured.graphs >= 2 * 256 * LARGE.vocab_size * 2  # logits in bfloat16, twice
    assert "captured decode steps" in str(captured)
    assert plan(enforce_eager=True).graphs == 0
    for without in (plan(triton=False), plan(attention_backend="gather")):
        assert without.graphs == 0
        assert without.activations > captured.activations + GATHERED_BYTES["cuda"]
    assert "graphs" not in str(plan(enforce_eager=True))


def test_masks_of_allowed_tokens_are_counted_on_the_device_and_beside_it() -> None:
    """A bit per row and token: 256 rows of LARGE's 128,256 tokens are 3.9 MiB."""

    def plan(num_rows: int, device: str = "cuda", **facts: bool) -> MemoryPlan:
        scheduler, on = SchedulerConfig(max_num_seqs=num_rows), DeviceConfig(device, "bfloat16", "bfloat16")
        return plan_memory(LARGE, EngineConfig(CacheConfig(16, 10), scheduler, on), replace(SERVER, **facts), 80 * GIB)

    step = 256 * LARGE.vocab_size // 8
    on_gpu = plan(256, triton=True)
    assert (on_gpu.masks, on_gpu.host_masks) == (2 * step, 3 * step + MASK_PARCELS * 4 * MIB)
    assert on_gpu.masks == 2 * plan(128, triton=True).masks
    assert on_gpu.fixed - replace(on_gpu, masks=0).fixed == on_gpu.masks
    assert "tokens that grammars allow, and up to 75.7 MiB of host memory" in str(on_gpu)
    without_triton, on_cpu = plan(256, triton=False), plan(256, "cpu")
    assert (without_triton.masks, without_triton.host_masks) == (0, 3 * step)
    assert (on_cpu.masks, on_cpu.host_masks) == (3 * step, 0)


def test_the_plan_counts_the_masks_that_the_runtime_and_the_engine_allocate() -> None:
    import torch

    from quire.engine.decoding.mask_table import MaskTable
    from quire.runtime.sampling.row_masks import RowMasks

    config = EngineConfig(
        CacheConfig(16, 10), SchedulerConfig(max_num_seqs=8), DeviceConfig("cuda", "bfloat16", "bfloat16")
    )
    plan = plan_memory(LARGE, config, replace(SERVER, triton=True), 80 * GIB)
    stays = RowMasks(8, LARGE.vocab_size, torch.device("cpu"))._bits
    assert 2 * stays.numel() * stays.element_size() == plan.masks
    table = MaskTable(8, LARGE.vocab_size)
    assert table._filled.nbytes + table._last.nbytes <= plan.host_masks


def test_the_host_tier_of_a_gpu_leaves_room_for_masks() -> None:
    fits = _tiered("cuda", 100)
    replace(fits, host_available=fits.host_cache + fits.host_masks).check()
    with pytest.raises(DoesNotFit, match="host_cache_memory: .* are available; lower it to"):
        replace(fits, host_available=fits.host_cache + fits.host_masks - 1).check()
    with pytest.raises(DoesNotFit, match="host_cache_memory: .* are available; leave it out"):
        replace(fits, host_available=fits.host_masks).check()


def _tiered(device: str, host_blocks: int) -> MemoryPlan:
    cache = CacheConfig(16, 1_000, tiers=TierConfig(host_blocks))
    config = EngineConfig(cache, SchedulerConfig(max_model_len=2_048), DeviceConfig(device, "float32", "float32"))
    facts = LAPTOP if device == "cpu" else SERVER
    return plan_memory(SMALL, config, facts, 12 * GIB)


def test_the_host_tier_of_a_cpu_is_part_of_its_memory() -> None:
    without, held = _tiered("cpu", 0), _tiered("cpu", 500)
    assert held.host_cache == 500 * held.block_bytes == held.total - without.total
    assert held.staging == 0
    assert "host cache" in str(held)
    assert "host cache" not in str(without)
    with pytest.raises(DoesNotFit, match=r"host_cache_memory: .*; lower it to (\d+)MiB or less") as caught:
        _tiered("cpu", 12 * GIB // held.block_bytes).check()
    most = int(caught.value.fix.split()[3].removesuffix("MiB")) * MIB
    _tiered("cpu", most // held.block_bytes).check()


def test_the_host_tier_of_a_gpu_lies_beside_it_and_needs_room_to_pass_through() -> None:
    without, held = _tiered("cuda", 0), _tiered("cuda", 10_000)
    assert held.host_cache == 10_000 * held.block_bytes
    assert held.total - without.total == held.staging == SAVE_STAGING_BYTES + LOAD_STAGING_BYTES
    assert _tiered("cuda", 3).staging == 6 * held.block_bytes
    held.check()
    with pytest.raises(DoesNotFit, match="host_cache_memory: .* are available; lower it to"):
        _tiered("cuda", SERVER.available_memory // held.block_bytes + 1).check()


def test_a_mixture_has_room_for_what_all_experts_of_a_token_give() -> None:
    config = EngineConfig(
        CacheConfig(16, 10),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2_048),
        DeviceConfig("cpu", "float32", "float32"),
    )
    experts = Experts(num=64, num_used=8, size=256)

    def activations(experts: Experts | None) -> int:
        return plan_memory(replace(SMALL, experts=experts), config, LAPTOP, 12 * GIB).activations

    few = activations(replace(experts, num_used=4))
    assert activations(experts) - few == 512 * 4 * 4 * (256 + SMALL.hidden_size + 2)
    assert activations(replace(experts, shared_size=1 << 16)) > activations(experts)
    assert activations(replace(experts, size=8, num_used=1, dense_layers=(0,))) == activations(None)
