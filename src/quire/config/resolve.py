"""Arguments + hardware facts + model -> one frozen EngineConfig and its memory plan. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

from quire.config.engine import MAX_BLOCK_SIZE, CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.layout import read_layout, settle_layout
from quire.config.memory import MemoryPlan, kv_block_bytes, plan_memory
from quire.config.model import CacheDtype, Dtype, ModelConfig, Quantization
from quire.config.policy import RESERVING, read_policy, read_policy_settings
from quire.config.prefix import read_eviction
from quire.config.recording import check_recording, read_recording
from quire.config.sizes import GIB, format_size, parse_size
from quire.config.speculation import SpeculationConfig, read_speculation, settle
from quire.config.tiers import TierConfig, check_tiers, read_preemption, read_tiers, settle_tiers
from quire.types.errors import ConfigError, DoesNotFit

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_SEQS = {"cpu": 64, "cuda": 256}
CPU_BATCHED_TOKENS = 512  # a CPU gains nothing from more, and answers late
GPU_BATCHED_TOKENS, SMALL_MODEL_TOKENS = 2_048, 4_096  # some ten milliseconds of a large GPU
SMALL_MODEL = 2_000_000_000  # parameters, below which a step of more tokens is as short
DEFAULT_GPU_UTILIZATION = 0.9
SHORTEST_MODEL_LEN = 256  # below this an engine that chose its own length is of no use
CPU_CACHE_LIMIT, CPU_CACHE_SHARE = GIB, 4  # at most 1 GiB and at most a quarter of what is available

_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_FLOAT8_NAMES = ("fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The engine settings a user may give; None means: choose for this machine and model."""

    dtype: str = "auto"
    device: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    num_kv_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    policy: str | None = None
    scheduling_policy: str | None = None  # the same by another name
    policy_config: dict[str, Any] | None = None
    seed: int = 0
    threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    prefix_eviction: str = "lru"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_layout: str = "paged"
    speculative_config: dict[str, Any] | None = None
    preemption: str = "auto"
    host_cache_memory: int | str | None = None
    swap_space: float | None = None  # the same in GiB
    disk_cache_path: str | None = None
    disk_cache_memory: int | str | None = None
    tier_write: str = "back"
    record: str | None = None
    record_tokens: str | None = None
    record_limit: int | str | None = None


class EngineSettings(TypedDict, total=False):
    """EngineArguments as the keywords of a call."""

    dtype: str
    device: str
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    policy: str | None
    scheduling_policy: str | None
    policy_config: dict[str, Any] | None
    seed: int
    threads: int | None
    attention_backend: str
    enforce_eager: bool
    enable_prefix_caching: bool | None
    prefix_eviction: str
    quantization: str | None
    kv_cache_dtype: str
    kv_layout: str
    speculative_config: dict[str, Any] | None
    preemption: str
    host_cache_memory: int | str | None
    swap_space: float | None
    disk_cache_path: str | None
    disk_cache_memory: int | str | None
    tier_write: str
    record: str | None
    record_tokens: str | None
    record_limit: int | str | None


def resolve_engine_config(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, draft_model: ModelConfig | None = None
) -> tuple[EngineConfig, MemoryPlan]:
    """The whole configuration, checked against the machine. Raises ConfigError or DoesNotFit; allocates nothing.

    `draft_model` is what `speculative_config` names, where it names one.
    """
    _check_types(args)
    device = _resolve_device(args, facts, model)
    kind = device.device.partition(":")[0]
    capacity = _capacity(args, facts, device.device)
    policy = read_policy(args.policy, args.scheduling_policy)
    scheduler = SchedulerConfig(
        max_num_seqs=args.max_num_seqs if args.max_num_seqs is not None else DEFAULT_NUM_SEQS[kind],
        max_num_batched_tokens=(
            args.max_num_batched_tokens if args.max_num_batched_tokens is not None else _batched_tokens(kind, model)
        ),
        max_model_len=_wanted_model_len(args, model),
        policy=policy,
        seed=args.seed,
        policy_settings=read_policy_settings(policy, args.policy_config),
        preemption=read_preemption(args.preemption),
    )
    caching = _prefix_caching(args, model, scheduler)
    layout, eviction = read_layout(args.kv_layout), read_eviction(args.prefix_eviction)
    tiers = _tiers(args, model, device)
    check_tiers(tiers, scheduler.preemption, policy, layout)
    cache = CacheConfig(args.block_size, 1, caching, layout, eviction, tiers=tiers)
    speculation = _speculation(args, model, draft_model)
    recording = read_recording(args.record, args.record_tokens, args.record_limit)
    check_recording(recording, speculates=speculation is not None, has_files=bool(tiers.disk_path))
    draft = EngineConfig(cache, scheduler, device, speculation, recording)
    draft = settle_layout(draft, facts, model)
    config = _size_cache(args, facts, model, draft, capacity)
    plan = plan_memory(model, config, facts, capacity)
    plan.check()
    return config, plan


def _speculation(args: EngineArguments, model: ModelConfig, draft: ModelConfig | None) -> SpeculationConfig | None:
    asked = read_speculation(args.speculative_config)
    return None if asked is None else settle(asked, model, draft)


def _tiers(args: EngineArguments, model: ModelConfig, device: DeviceConfig) -> TierConfig:
    asked = read_tiers(
        args.host_cache_memory, args.swap_space, args.disk_cache_path, args.disk_cache_memory, args.tier_write
    )
    return settle_tiers(asked, kv_block_bytes(model, device.kv_dtype, args.block_size))


def model_length(model: ModelConfig) -> int:
    """The longest sequence the model's positions are made for, its rope scaling included."""
    rope, scaling = model.rope, dict(model.rope.scaling)
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_position * scaling.get("factor", 1.0))
    if rope.kind == "yarn":
        trained = scaling.get("original_max_position_embeddings", float(rope.max_position))
        return max(rope.max_position, int(trained * scaling.get("factor", 1.0)))
    return rope.max_position


def _check_types(args: EngineArguments) -> None:
    for name in ("block_size", "num_kv_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"):
        value = getattr(args, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(name, f"must be a whole number, got {value!r}")
        if value < 1:
            raise ConfigError(name, f"must be at least 1, got {value}", "raise it")
    if args.block_size > MAX_BLOCK_SIZE:
        raise ConfigError(
            "block_size", f"must be at most {MAX_BLOCK_SIZE}, got {args.block_size}", "16 suits most loads"
        )
    seed: object = args.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ConfigError("seed", f"must be a whole number in [0, 2**64), got {args.seed!r}")
    share: object = args.gpu_memory_utilization
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        raise ConfigError("gpu_memory_utilization", f"must be a number, got {share!r}")
    for switch in ("enforce_eager", "enable_prefix_caching"):
        value = getattr(args, switch)
        if not isinstance(value, bool) and (value is not None or switch == "enforce_eager"):
            raise ConfigError(switch, f"must be true or false, got {value!r}")
    if args.num_kv_blocks is not None and args.kv_cache_memory is not None:
        raise ConfigError("num_kv_blocks", "cannot be given together with kv_cache_memory", "choose one of them")


def _prefix_caching(args: EngineArguments, model: ModelConfig, scheduler: SchedulerConfig) -> bool:
    """On, unless the policy shares no memory, or a token's keys depend on more than the tokens before it."""
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
    return False


def _batched_tokens(kind: str, model: ModelConfig) -> int:
    """Enough tokens to fill the device, few enough that those who decode do not wait long for a step."""
    if kind == "cpu":
        return CPU_BATCHED_TOKENS
    return SMALL_MODEL_TOKENS if model.num_parameters < SMALL_MODEL else GPU_BATCHED_TOKENS


def _resolve_device(args: EngineArguments, facts: HardwareFacts, model: ModelConfig) -> DeviceConfig:
    device = facts.device if args.device == "auto" else args.device
    kind, colon, index = device.partition(":")
    if (kind, colon) not in (("cpu", ""), ("cuda", ""), ("cuda", ":")) or (colon and not index.isdigit()):
        raise ConfigError("device", f"{args.device!r} is unknown", 'use "auto", "cpu", "cuda" or "cuda:N"')
    if kind == "cuda" and cuda_index(device) >= len(facts.cuda):
        found = f"torch {facts.torch_version} found {len(facts.cuda)} CUDA devices"
        raise ConfigError("device", f"{args.device!r} is not there: {found}", 'use "cpu", or run `quire doctor`')
    if args.dtype != "auto" and args.dtype not in _DTYPES:
        raise ConfigError("dtype", f"{args.dtype!r} is unknown", 'use "auto", "float32", "bfloat16" or "float16"')
    dtype = _auto_dtype(facts, device, model) if args.dtype == "auto" else _DTYPES[args.dtype]
    if kind == "cuda" and not facts.computes(dtype, device):
        raise ConfigError("dtype", f"{dtype} needs compute capability 8.0 or newer", "use float16")
    return DeviceConfig(
        device,
        dtype,
        _kv_dtype(args, facts, device, dtype),
        args.threads,
        args.attention_backend,
        args.enforce_eager,
        _quantization(args, facts, device),
    )


def _quantization(args: EngineArguments, facts: HardwareFacts, device: str) -> Quantization | None:
    if args.quantization is None:
        return None
    if args.quantization != "fp8":
        raise ConfigError("quantization", f"{args.quantization!r} is unknown", 'use "fp8", or leave it out')
    _check_float8("quantization", facts, device)
    return "fp8"


def _kv_dtype(args: EngineArguments, facts: HardwareFacts, device: str, dtype: Dtype) -> CacheDtype:
    if args.kv_cache_dtype == "auto":
        return dtype
    if args.kv_cache_dtype not in _FLOAT8_NAMES:
        names = " or ".join(f'"{name}"' for name in _FLOAT8_NAMES)
        raise ConfigError("kv_cache_dtype", f"{args.kv_cache_dtype!r} is unknown", f'use "auto", {names}')
    _check_float8("kv_cache_dtype", facts, device)
    return "float8"


def _check_float8(field: str, facts: HardwareFacts, device: str) -> None:
    if device != "cpu" and not facts.cuda[cuda_index(device)].supports_fp8:
        raise ConfigError(field, "fp8 needs compute capability 8.9 or newer", "leave it out")


def _auto_dtype(facts: HardwareFacts, device: str, model: ModelConfig) -> Dtype:
    if device == "cpu":
        return "bfloat16" if facts.supports_bf16 else "float32"
    if model.dtype == "float16" or not facts.computes("bfloat16", device):
        return "float16"
    return "bfloat16"


def _capacity(args: EngineArguments, facts: HardwareFacts, device: str) -> int:
    """Bytes the process may take on the device."""
    utilization = args.gpu_memory_utilization
    if utilization is not None and not 0.0 < utilization <= 1.0:
        raise ConfigError("gpu_memory_utilization", f"must be in (0, 1], got {utilization!r}", "0.9 is the default")
    if device == "cpu":
        if utilization is not None:
            raise ConfigError("gpu_memory_utilization", "has no meaning on the CPU", "set kv_cache_memory instead")
        return facts.available_memory
    gpu = facts.cuda[cuda_index(device)]
    share = DEFAULT_GPU_UTILIZATION if utilization is None else utilization
    return min(int(gpu.total_memory * share), gpu.free_memory)


def _wanted_model_len(args: EngineArguments, model: ModelConfig) -> int:
    longest = model_length(model)
    if args.max_model_len is None:
        return longest
    if args.max_model_len > longest:
        reason = f"is {args.max_model_len}, but the model knows {longest} positions"
        raise ConfigError("max_model_len", reason, f"set it to {longest} or less")
    return args.max_model_len


def _size_cache(
    args: EngineArguments, facts: HardwareFacts, model: ModelConfig, draft: EngineConfig, capacity: int
) -> EngineConfig:
    """Give the draft its blocks, and where the user left max_model_len open, the longest that memory allows."""
    while True:
        num_blocks = _num_blocks(args, plan_memory(model, draft, facts, capacity), draft.scheduler.num_rows)
        sized = replace(draft, cache=replace(draft.cache, num_blocks=num_blocks))
        length, held = draft.scheduler.max_model_len, num_blocks * args.block_size
        if args.max_model_len is not None or held >= length:
            return sized
        if args.num_kv_blocks is not None or args.kv_cache_memory is not None:
            return replace(sized, scheduler=replace(draft.scheduler, max_model_len=held))
        if length <= SHORTEST_MODEL_LEN:
            where = f"{format_size(capacity)} on {draft.device.device}"
            short = f"not even {length} tokens fit beside its weights in {where}"
            raise DoesNotFit("model", short, "choose a smaller model or dtype, or free memory")
        shorter = max(SHORTEST_MODEL_LEN, held, length * 3 // 4)
        draft = replace(draft, scheduler=replace(draft.scheduler, max_model_len=min(shorter, length - 1)))


def _num_blocks(args: EngineArguments, one: MemoryPlan, num_rows: int) -> int:
    """The user's number of blocks, or as many as memory has room for; `one` is the plan with a single block."""
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    if args.kv_cache_memory is not None:
        size = parse_size("kv_cache_memory", args.kv_cache_memory)
        if size < one.block_bytes:
            reason = f"{format_size(size)} hold no block: one of {one.block_size} tokens takes"
            raise DoesNotFit("kv_cache_memory", f"{reason} {format_size(one.block_bytes)}", "raise it")
        return size // one.block_bytes
    room = one.capacity - one.fixed
    if one.device == "cpu":
        room = min(room, CPU_CACHE_LIMIT, one.capacity // CPU_CACHE_SHARE)
    at_least_one = one.blocks_per_sequence if args.max_model_len is not None else 1
    return max(min(room // one.block_bytes, one.blocks_per_sequence * num_rows), at_least_one)
