"""Resolves arguments, machine and model to an EngineConfig and its memory plan. Allocates nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from quire.config.adapters import host_adapters
from quire.config.arguments import (
    CACHE_DTYPES,
    CPU_WEIGHTS,
    DTYPES,
    VIRTUAL_BACKEND,
    EngineArguments,
    check_uncached,
    read_arguments,
)
from quire.config.engine import MAX_BLOCK_SIZE, CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.kv_cache import PLAIN, SCALED_DTYPES, KVGroups, lay_out, stored_specs
from quire.config.lengths import check_chunks, wanted_length
from quire.config.memory import ADAPTER_FIX, MemoryPlan, kv_block_bytes, plan_memory, state_groups
from quire.config.model import QUANTIZATIONS, CacheDtype, Dtype, ModelConfig, Quantization
from quire.config.parallel import check_parallel
from quire.config.policy import RESERVING
from quire.config.rank_model import largest_rank, planned_rank
from quire.config.sizes import GIB, MIB, format_size, parse_size
from quire.config.speculation import SpeculationConfig, check_head, resolve_speculation
from quire.config.stages import heaviest_stage, planned_stages, resolve_pipeline, smaller_cache, stage_models
from quire.config.tiers import resolve_tiers
from quire.config.transport import check_transport
from quire.config.vision import check_media_path, resolve_images
from quire.types.errors import ConfigError, DoesNotFit

logger = logging.getLogger("quire")

DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 256}
CPU_BATCHED_TOKENS = 512  # on a CPU, longer steps are not faster per token and delay decodes
GPU_BATCHED_TOKENS, SMALL_MODEL_TOKENS = 2_048, 4_096  # about ten milliseconds of work on a large GPU
OFFLINE_TOKENS, OFFLINE_SMALL_TOKENS = 4_096, 16_384  # offline, throughput matters more than latency: larger steps
OFFLINE_EXPERT_TOKENS = 8_192  # larger for mixtures, because each expert gets few of a step's tokens
LARGE_GPU = 40 * GIB  # memory in bytes; on smaller GPUs, large steps leave too little for the cache
SMALL_MODEL = 2_000_000_000  # models with fewer parameters get SMALL_MODEL_TOKENS
DEFAULT_GPU_UTILIZATION = 0.9
SHORTEST_MODEL_LEN = 256  # max_model_len is never lowered below this to fit into memory
GPU_PAGE = 2 * MIB  # the smallest page that CUDA maps
STATES_PER_ROW, SPARE_STATES = 2, 16  # state slots: per row for running sequences, and spare ones for prefixes
STATES_SHARE = 3  # states take at most 1 / STATES_SHARE of the memory left for the cache
CPU_CACHE_LIMIT, CPU_CACHE_SHARE = GIB, 4  # default KV cache on a CPU: a quarter of the available memory, at most 1 GiB


def resolve_engine_config(
    args: EngineArguments,
    facts: HardwareFacts,
    model: ModelConfig,
    draft_model: ModelConfig | None = None,
    *,
    offline: bool = False,
) -> tuple[EngineConfig, MemoryPlan]:
    """Make the whole configuration and check it against the machine. Raises ConfigError or DoesNotFit.

    `draft_model`: the model that `speculative_config` names, if any. `offline`: requests come as batches, for which
    only the time of the last answer counts; otherwise latency per token counts.
    """
    parsed, device = read_arguments(args), resolve_device(args, facts, model)
    parallel = parsed.parallel
    check_parallel(parallel, device.device, len(facts.cuda), parsed.layout, model.experts is not None)
    kind = device.device.partition(":")[0]
    capacity = device_capacity(args, facts, device.device) // (parallel.num_ranks if kind == "cpu" else 1)
    scheduler = SchedulerConfig(
        max_num_seqs=args.max_num_seqs if args.max_num_seqs is not None else DEFAULT_NUM_SEQS[kind],
        max_num_batched_tokens=(
            args.max_num_batched_tokens
            if args.max_num_batched_tokens is not None
            else _batched_tokens(device.device, facts, model, offline=offline)
        ),
        max_model_len=wanted_length(args, model),
        policy=parsed.policy,
        seed=args.seed,
        policy_settings=parsed.policy_settings,
        preemption=parsed.preemption,
        adapter_slots=0 if parsed.adapters is None else parsed.adapters.slots,
    )
    images = resolve_images(
        model.vision, args.limit_mm_per_prompt, args.mm_processor_kwargs, scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
    )  # fmt: skip
    check_media_path(args.allowed_local_media_path, images)
    if images is not None and parsed.recording is not None:
        logger.warning("requests with images are refused while the engine is recorded: recordings hold no images")
        images = None
    scheduler = replace(scheduler, images=images, host_adapters=host_adapters(parsed.adapters))
    check_chunks(model, args.block_size)
    caching = _prefix_caching(args, model, scheduler)
    host_field = "host_cache_memory" if args.swap_space is None else "swap_space"
    speculation = None if parsed.speculation is None else resolve_speculation(parsed.speculation, model, draft_model)
    _check_scaled(device.kv_dtype, [model] if draft_model is None else [model, draft_model])
    own = planned_rank(model, draft_model, parallel, device.kv_dtype)
    groups = _groups(own, scheduler, device, parsed.layout, speculation)
    check_head(speculation, layout=parsed.layout, has_tiers=parsed.tiers.enabled)
    check_transport(parsed.tiers.transport, parallel)
    cache = CacheConfig(args.block_size, 1, caching, parsed.layout, parsed.eviction, tiers=parsed.tiers, groups=groups)
    unsized = EngineConfig(cache, scheduler, device, speculation, parsed.recording, parsed.adapters, parallel)
    unsized = resolve_pipeline(_resolve_layout(unsized, facts, model), model)
    unsized = _size_tiers(unsized, model, host_field)
    try:
        return _fit(args, facts, model, unsized, capacity)
    except DoesNotFit as error:
        if error.setting != "host_cache_memory":
            raise
        raise DoesNotFit(host_field, error.reason, error.fix) from None


def _fit(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, unsized: EngineConfig, capacity: int
) -> tuple[EngineConfig, MemoryPlan]:
    """Set the size of the cache, and plan the memory of one rank: that of the pipeline stage that needs most. The cache
    fits on every stage, and on the last one beside what drafts."""
    stages = planned_stages(model, unsized)
    config = _size_cache(args, facts, stages[0], unsized, capacity)
    for stage in stages[1:]:
        config = smaller_cache(config, _size_cache(args, facts, stage, config, capacity))
    config = resolve_pipeline(config, model)
    plans = [plan_memory(stage, config, facts, capacity) for stage in stages]
    for plan in plans:
        plan.check()
    return config, max(plans, key=lambda plan: plan.total)


def _size_tiers(config: EngineConfig, model: ModelConfig, host_field: str) -> EngineConfig:
    """Convert the sizes of the tiers from bytes of a rank to blocks, by the bytes of the rank that needs most."""
    parallel, cache = config.parallel, config.cache
    rank = largest_rank(heaviest_stage(stage_models(model, parallel.pipeline)), parallel)
    block_bytes = kv_block_bytes(rank, config.device.kv_dtype, cache.block_size, cache.groups)
    return replace(config, cache=replace(cache, tiers=resolve_tiers(cache.tiers, block_bytes, host_field)))


def _prefix_caching(args: EngineArguments, model: ModelConfig, scheduler: SchedulerConfig) -> bool:
    """Return whether to cache prefixes. Off if the policy reserves blocks, or if keys depend on the length of the
    sequence (dynamic RoPE scaling)."""
    rope = model.rope
    if scheduler.policy in RESERVING:
        if args.enable_prefix_caching:
            reason = f"shares memory, and the {scheduler.policy!r} policy gives each sequence its own"
            raise ConfigError("enable_prefix_caching", reason, "leave it out")
        return False
    if rope.kind != "dynamic" or scheduler.max_model_len <= rope.max_position:
        return args.enable_prefix_caching is not False
    if args.enable_prefix_caching:
        reason = f"cannot be exact: beyond {rope.max_position} tokens dynamic rope scaling depends on the whole length"
        raise ConfigError("enable_prefix_caching", reason, f"leave it out, or set max_model_len to {rope.max_position}")
    why = f"with dynamic rope scaling nothing is cached unless max_model_len is {rope.max_position} or less"
    check_uncached(args, scheduler.policy, why)
    return False


def _groups(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    device: DeviceConfig,
    layout: str,
    speculation: SpeculationConfig | None,
) -> KVGroups:
    """Return the groups of a model's layers. Layers with a window get window blocks if that saves memory and everything
    that reads the cache supports them: not with reserved blocks, the virtual layout, a draft model or FlashInfer."""
    groups = lay_out(stored_specs(model.kv_specs, device.kv_dtype), split=True)
    drafts = speculation is not None and speculation.method != "ngram"
    reads_one = layout != "paged" or scheduler.policy in RESERVING or device.attention_backend == "flashinfer"
    is_long = groups.window is not None and groups.window < scheduler.max_model_len
    if reads_one or drafts or not is_long:
        return PLAIN
    return KVGroups(groups.window, groups.num_window_blocks, is_chunked=model.has_chunks)


def _batched_tokens(device: str, facts: HardwareFacts, model: ModelConfig, *, offline: bool) -> int:
    """Return the default number of tokens per step: enough to fill the device, few enough not to delay decodes."""
    if device.partition(":")[0] == "cpu":
        return CPU_BATCHED_TOKENS
    is_small = model.num_parameters < SMALL_MODEL
    if offline and facts.cuda[cuda_index(device)].total_memory >= LARGE_GPU:
        large = OFFLINE_TOKENS if model.experts is None else OFFLINE_EXPERT_TOKENS
        return OFFLINE_SMALL_TOKENS if is_small else large
    return SMALL_MODEL_TOKENS if is_small else GPU_BATCHED_TOKENS


def resolve_device(args: EngineArguments, facts: HardwareFacts, model: ModelConfig) -> DeviceConfig:
    device = facts.device if args.device == "auto" else args.device
    kind = device.partition(":")[0]
    if kind == "cuda" and cuda_index(device) >= len(facts.cuda):
        found = f"torch {facts.torch_version} found {len(facts.cuda)} CUDA devices"
        raise ConfigError("device", f"{args.device!r} is not there: {found}", 'use "cpu", or run `quire doctor`')
    dtype = _auto_dtype(args, facts, device, model) if args.dtype == "auto" else DTYPES[args.dtype]
    if kind == "cuda" and not facts.computes(dtype, device):
        raise ConfigError("dtype", f"{dtype} needs compute capability 8.0 or newer", "use float16")
    return DeviceConfig(
        device, dtype, _kv_dtype(args, facts, device, dtype), args.threads, args.attention_backend, args.enforce_eager,
        _quantization(args, facts, device, model), CPU_WEIGHTS.get(args.cpu_weights) or facts.cpu_weights(dtype),
        args.enable_sleep_mode,
    )  # fmt: skip


def _quantization(args: EngineArguments, facts: HardwareFacts, device: str, model: ModelConfig) -> Quantization | None:
    """Return the method by which plain weights are quantized while they are loaded. Naming the method of a quantized
    checkpoint is allowed and changes nothing."""
    given = args.quantization
    if given is None or given == model.quantization:
        return None
    if model.quantization is not None:
        raise ConfigError("quantization", f"the checkpoint is quantized already ({model.quantization})", "leave it out")
    chosen = next((known for known in QUANTIZATIONS if known == given), None)
    if chosen is None:
        raise ConfigError("quantization", f"the checkpoint is not stored as {given}", "leave it out")
    if chosen == "fp8":
        _check_float8("quantization", facts, device)
    elif device != "cpu" and model.experts is not None:
        reason = f"{chosen} is not supported for mixtures of experts on a GPU"
        raise ConfigError("quantization", reason, 'use "fp8", or leave it out')
    return chosen


def _kv_dtype(args: EngineArguments, facts: HardwareFacts, device: str, dtype: Dtype) -> CacheDtype:
    if args.kv_cache_dtype == "auto":
        return dtype
    chosen = CACHE_DTYPES[args.kv_cache_dtype]
    if chosen == "float8":
        _check_float8("kv_cache_dtype", facts, device)
    return chosen


def _check_scaled(kv_dtype: CacheDtype, models: Sequence[ModelConfig]) -> None:
    """Raise ConfigError if keys and values of these models cannot be kept in this dtype."""
    if kv_dtype not in SCALED_DTYPES:
        return
    multiple = 8 if kv_dtype == "int4" else 4
    for heads in (heads for model in models for heads in model.all_heads):
        if heads.latent is not None and kv_dtype != "float8":
            reason = f"{kv_dtype} cannot hold latents, which this model keeps in place of keys and values"
            raise ConfigError("kv_cache_dtype", reason, 'use "fp8" or "auto"')
        if heads.latent is None and heads.dim % multiple:
            reason = f"{kv_dtype} needs heads of a multiple of {multiple} numbers, this model has {heads.dim}"
            raise ConfigError("kv_cache_dtype", reason, 'use "auto"')


def _check_float8(field: str, facts: HardwareFacts, device: str) -> None:
    if device != "cpu" and not facts.cuda[cuda_index(device)].supports_fp8:
        raise ConfigError(field, "fp8 needs compute capability 8.9 or newer", "leave it out")


def _auto_dtype(args: EngineArguments, facts: HardwareFacts, device: str, model: ModelConfig) -> Dtype:
    if device == "cpu":
        is_quantized = model.levels.integer_bytes > 0 or args.quantization in ("int8", "int4")
        return facts.cpu_dtype(integer=is_quantized and args.cpu_weights != "float")
    return "float16" if model.dtype == "float16" or not facts.computes("bfloat16", device) else "bfloat16"


def _resolve_layout(config: EngineConfig, facts: HardwareFacts, model: ModelConfig) -> EngineConfig:
    """Set the attention backend that the layout of the KV cache needs. Raises ConfigError if the layout does not work
    with the other settings."""
    if config.cache.layout == "paged":
        return config
    if model.recurrent is not None:
        reason = '"virtual" does not support models with recurrent layers'
        raise ConfigError("kv_layout", reason, 'use "paged"')
    if config.scheduler.images is not None and config.scheduler.images.grid.is_whole:
        raise ConfigError("kv_layout", '"virtual" does not support images that see themselves whole', 'use "paged"')
    if config.device.kv_dtype in SCALED_DTYPES:
        reason = f'{config.device.kv_dtype} cannot be read in place, as kv_layout "virtual" does'
        raise ConfigError("kv_cache_dtype", reason, 'use "auto", or kv_layout="paged"')
    draft = None if config.speculation is None else config.speculation.draft
    for each in (model, draft):
        if each is not None and each.latent is not None:
            raise ConfigError("kv_layout", '"virtual" does not support models that keep latents', 'use "paged"')
        if each is not None:
            _check_pages(config, facts, each)
    return replace(config, device=replace(config.device, attention_backend=VIRTUAL_BACKEND))


def _check_pages(config: EngineConfig, facts: HardwareFacts, model: ModelConfig) -> None:
    """Raise ConfigError unless a block is a whole number of pages, because nothing smaller can be mapped."""
    size, device = config.cache.block_size, config.device
    page = facts.page_size if device.device == "cpu" else GPU_PAGE
    token = kv_block_bytes(model, device.kv_dtype, 1)
    if token * size % page == 0:
        return
    least = page // gcd(page, token)
    reason = f"{size} tokens of {token:,} bytes are no whole number of pages of {format_size(page)}"
    fix = f"use {least} or a multiple of it" if least <= MAX_BLOCK_SIZE else 'no size is; use kv_layout="paged"'
    raise ConfigError("block_size", f'with kv_layout "virtual", {reason}', fix)


def device_capacity(args: EngineArguments, facts: HardwareFacts, device: str) -> int:
    """Return the bytes that the process may use on the device."""
    utilization = args.gpu_memory_utilization
    if device == "cpu":
        if utilization is not None:
            logger.warning(
                "gpu_memory_utilization has no effect on a CPU; kv_cache_memory sets the size of the KV cache"
            )
        return facts.available_memory
    gpu = facts.cuda[cuda_index(device)]
    share = DEFAULT_GPU_UTILIZATION if utilization is None else utilization
    return min(int(gpu.total_memory * share), gpu.free_memory)


def _size_cache(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, unsized: EngineConfig, capacity: int
) -> EngineConfig:
    """Set the number of blocks and, if the user gave no max_model_len, the longest length that fits into memory."""
    unsized = _with_states(args, facts, model, unsized, capacity)
    while True:
        one = plan_memory(model, unsized, facts, capacity)
        num_blocks = _num_blocks(args, one, unsized.scheduler.num_rows)
        sized = replace(unsized, cache=replace(unsized.cache, num_blocks=num_blocks))
        length, held = unsized.scheduler.max_model_len, one.longest_in(num_blocks)
        if args.max_model_len is not None or held >= length:
            return sized
        if args.num_kv_blocks is not None or args.kv_cache_memory is not None:
            longest = held or args.block_size  # MemoryPlan.check refuses a length that needs more blocks
            return replace(sized, scheduler=replace(unsized.scheduler, max_model_len=longest))
        if length <= SHORTEST_MODEL_LEN:
            raise _too_short(one)
        shorter = max(SHORTEST_MODEL_LEN, held, length * 3 // 4)
        unsized = replace(unsized, scheduler=replace(unsized.scheduler, max_model_len=min(shorter, length - 1)))


def _too_short(plan: MemoryPlan) -> DoesNotFit:
    """Return the error for a machine on which not even a short sequence fits. It names what uses the memory."""
    where = f"in {format_size(plan.capacity)} on {plan.device}"
    smallest_cache = plan.blocks_per_sequence * plan.block_bytes
    fix = plan.host_fix(smallest_cache)
    if fix is not None:
        host = f"not even {plan.max_model_len} tokens fit beside {format_size(plan.host_cache)} of it {where}"
        return DoesNotFit("host_cache_memory", host, fix)
    if plan.adapters and plan.capacity - plan.fixed + plan.all_adapters >= smallest_cache:
        beside = f"not even {plan.max_model_len} tokens fit beside {format_size(plan.all_adapters)} of adapters {where}"
        return DoesNotFit("max_loras", beside, ADAPTER_FIX)
    short = f"not even {plan.max_model_len} tokens fit beside its weights {where}"
    return DoesNotFit("model", short, "choose a smaller model or dtype, or free memory")


def _num_blocks(args: EngineArguments, one: MemoryPlan, num_rows: int) -> int:
    """Return the number of blocks that the user gave, or that fits into memory. `one`: the plan for one block."""
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    if args.kv_cache_memory is not None:
        size = parse_size("kv_cache_memory", args.kv_cache_memory)
        if size < one.block_bytes:
            reason = f"{format_size(size)} hold no block: one of {one.block_size} tokens takes"
            raise DoesNotFit("kv_cache_memory", f"{reason} {format_size(one.block_bytes)}", "raise it")
        if size < one.block_bytes + one.states:
            states = f"{one.groups.num_states} states of recurrent layers"
            reason = f"{format_size(size)} hold no block beside {states}, which take"
            raise DoesNotFit(
                "kv_cache_memory", f"{reason} {format_size(one.states)}", "raise it, or lower max_num_seqs"
            )
        return (size - one.states) // one.block_bytes
    room = _cache_room(args, one) - one.states
    at_least_one = one.blocks_per_sequence if args.max_model_len is not None else 1
    return max(min(room // one.block_bytes, one.blocks_per_sequence * num_rows), at_least_one)


def _with_states(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, unsized: EngineConfig, capacity: int
) -> EngineConfig:
    """Set the number of state slots for recurrent layers: at least as many as rows need. If the user did not set
    max_num_seqs, it is lowered to what memory can hold."""
    if model.recurrent is None:
        return unsized
    if unsized.scheduler.policy in RESERVING:
        reason = f"{unsized.scheduler.policy!r} reserves blocks, and gives no states to recurrent layers"
        raise ConfigError("policy", reason, "use another policy")
    device, cache, rows = unsized.device, unsized.cache, unsized.scheduler.num_rows
    own = largest_rank(model, unsized.parallel)
    none = replace(unsized, cache=replace(cache, groups=state_groups(own, device.kv_dtype, cache.block_size, 0)))
    plan = plan_memory(model, none, facts, capacity)
    room = max(0, _cache_room(args, plan)) // STATES_SHARE // plan.state_bytes
    scheduler = unsized.scheduler
    if args.max_num_seqs is None and room < _least_states(rows):
        rows = max(1, (room - 1) * 2 // 3)
        scheduler = replace(scheduler, max_num_seqs=rows)
    least = _least_states(rows) + (unsized.speculation is not None)  # one is kept while a draft is verified
    count = max(least, min(STATES_PER_ROW * rows + SPARE_STATES, room))
    groups = state_groups(own, device.kv_dtype, cache.block_size, count)
    return replace(unsized, cache=replace(cache, groups=groups), scheduler=scheduler)


def _least_states(num_rows: int) -> int:
    """Return how many state slots rows need at once. Beams that leave their parents' states hold both for one step."""
    return num_rows + num_rows // 2 + 1


def _cache_room(args: EngineArguments, plan: MemoryPlan) -> int:
    """Return the bytes that blocks and states may take together."""
    if args.kv_cache_memory is not None:
        return parse_size("kv_cache_memory", args.kv_cache_memory)
    room = plan.capacity - plan.fixed + plan.states
    return min(room, CPU_CACHE_LIMIT, plan.capacity // CPU_CACHE_SHARE) if plan.device == "cpu" else room
