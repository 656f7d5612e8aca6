"""The engine settings that a user may give, and the checks that need neither the machine nor the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from quire.config.adapters import (
    AdapterConfig,
    AdapterModule,
    read_lora_dir,
    read_modules,
    read_weights_dir,
    resolve_adapters,
)
from quire.config.engine import MAX_BLOCK_SIZE
from quire.config.model import QUANTIZATIONS, STORED_METHODS, CacheDtype, CpuWeights, Dtype
from quire.config.parallel import DEFAULT_RANK_TIMEOUT, ParallelConfig, read_parallel
from quire.config.policy import RESERVING, PolicyName, PolicySettings, read_policy, read_policy_settings
from quire.config.recording import RecordingConfig, check_recording, read_recording
from quire.config.sizes import parse_size
from quire.config.speculation import SpeculationConfig, read_speculation
from quire.config.tiers import (
    EvictionName,
    PreemptionName,
    TierConfig,
    check_tiers,
    read_eviction,
    read_preemption,
    read_tiers,
)
from quire.config.transport import read_transport
from quire.types.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16
DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
ATTENTION_BACKENDS = ("auto", "triton", "native", "flashinfer", "gather", "reference")
VIRTUAL_BACKEND = "virtual"  # selected by kv_layout="virtual", never by name
CACHE_DTYPES: dict[str, CacheDtype] = {"fp8": "float8", "fp8_e4m3": "float8", "int8": "int8", "int4": "int4"}
CPU_WEIGHTS: dict[str, CpuWeights] = {
    "integer": "integer",
    "integer8": "integer8",
    "integer16": "integer16",
    "float": "float",
}
_COUNTS = ("block_size", "num_kv_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The engine settings that a user may give. None: the engine chooses by the machine and the model."""

    task: str = "auto"
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
    scheduling_policy: str | None = None  # another name of policy
    policy_config: dict[str, Any] | None = None
    seed: int = 0
    threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    enable_prefix_caching: bool | None = None
    prefix_eviction: str | None = None
    quantization: str | None = None
    cpu_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_layout: str = "paged"
    speculative_config: dict[str, Any] | None = None
    preemption: str = "auto"
    host_cache_memory: int | str | None = None
    swap_space: float | None = None  # host_cache_memory in GiB
    disk_cache_path: str | None = None
    disk_cache_memory: int | str | None = None
    tier_write: str | None = None
    kv_role: str | None = None
    kv_transport: str | None = None
    kv_transport_memory: int | str | None = None
    kv_token_file: str | None = None
    record: str | None = None
    record_tokens: str | None = None
    record_limit: int | str | None = None
    limit_mm_per_prompt: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    allowed_local_media_path: str | None = None
    enable_lora: bool = False
    lora_modules: list[Any] | dict[str, str] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    lora_experts: bool = False
    weights_dir: str | None = None  # folder from which clients of a server may load weights
    lora_dir: str | None = None  # folder from which clients of a server may load adapters
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    executor: str = "auto"
    ray_address: str | None = None
    rank_timeout: float = DEFAULT_RANK_TIMEOUT


class EngineSettings(TypedDict, total=False):
    """The fields of EngineArguments as keyword arguments."""

    task: str
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
    enable_sleep_mode: bool
    enable_prefix_caching: bool | None
    prefix_eviction: str | None
    quantization: str | None
    cpu_weights: str
    kv_cache_dtype: str
    kv_layout: str
    speculative_config: dict[str, Any] | None
    preemption: str
    host_cache_memory: int | str | None
    swap_space: float | None
    disk_cache_path: str | None
    disk_cache_memory: int | str | None
    tier_write: str | None
    kv_role: str | None
    kv_transport: str | None
    kv_transport_memory: int | str | None
    kv_token_file: str | None
    record: str | None
    record_tokens: str | None
    record_limit: int | str | None
    limit_mm_per_prompt: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None
    allowed_local_media_path: str | None
    enable_lora: bool
    lora_modules: list[Any] | dict[str, str] | None
    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None
    lora_experts: bool
    weights_dir: str | None
    lora_dir: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    executor: str
    ray_address: str | None
    rank_timeout: float


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """Arguments converted to configuration types. The sizes of tiers are in bytes until `resolve_tiers` converts them
    to blocks."""

    policy: PolicyName
    policy_settings: PolicySettings
    preemption: PreemptionName
    layout: Literal["paged", "virtual"]
    eviction: EvictionName
    tiers: TierConfig
    speculation: SpeculationConfig | None
    recording: RecordingConfig | None
    adapters: AdapterConfig | None
    modules: tuple[AdapterModule, ...]  # adapters to load at the start
    parallel: ParallelConfig


def read_arguments(args: EngineArguments) -> ParsedArguments:
    """Parse the arguments. Raises ConfigError for values that are wrong on every machine and with every model."""
    _check_numbers(args)
    _check_names(args)
    policy = read_policy(args.policy, args.scheduling_policy)
    disk = (args.disk_cache_path, args.disk_cache_memory)
    transport = read_transport(args.kv_role, args.kv_transport, args.kv_transport_memory, args.kv_token_file)
    parsed = ParsedArguments(
        policy=policy,
        policy_settings=read_policy_settings(policy, args.policy_config),
        preemption=read_preemption(args.preemption),
        layout=_read_layout(args.kv_layout, args.attention_backend),
        eviction=read_eviction(args.prefix_eviction),
        tiers=read_tiers(args.host_cache_memory, args.swap_space, *disk, args.tier_write, transport),
        speculation=read_speculation(args.speculative_config),
        recording=read_recording(args.record, args.record_tokens, args.record_limit),
        adapters=resolve_adapters(
            enable=args.enable_lora,
            slots=args.max_loras,
            max_rank=args.max_lora_rank,
            host_adapters=args.max_cpu_loras,
            experts=args.lora_experts,
        ),
        modules=read_modules(args.lora_modules, enable=args.enable_lora),
        parallel=read_parallel(
            args.tensor_parallel_size,
            args.pipeline_parallel_size,
            args.enable_expert_parallel,
            args.executor,
            args.ray_address,
            args.rank_timeout,
        ),
    )
    read_lora_dir(args.lora_dir, enable=args.enable_lora)
    read_weights_dir(args.weights_dir)
    check_tiers(parsed.tiers, parsed.preemption, policy, parsed.layout)
    speculates, has_files = parsed.speculation is not None, bool(parsed.tiers.disk_path)
    check_recording(parsed.recording, speculates=speculates, has_files=has_files)
    if parsed.recording is not None and transport is not None:
        reason = "cannot be replayed with kv_transport: what other engines send is not recorded"
        raise ConfigError("record", reason, "leave one of them out")
    if policy in RESERVING:
        check_uncached(args, policy, f"the {policy!r} policy has no prefix cache")
    elif args.enable_prefix_caching is False:
        check_uncached(args, policy, "enable_prefix_caching is off")
    return parsed


def check_uncached(args: EngineArguments, policy: PolicyName, why: str) -> None:
    """Raise ConfigError for arguments that need a prefix cache. `why`: the reason why there is none."""
    if policy == "lpm":
        raise ConfigError("policy", f"'lpm' orders requests by their cached prefixes, and {why}", "use another policy")
    given = {
        "prefix_eviction": (args.prefix_eviction, "says which cached prompts are evicted first"),
        "disk_cache_path": (args.disk_cache_path, "holds cached prompts"),
        "tier_write": (args.tier_write, "says when cached prompts are saved"),
        "kv_transport": (args.kv_transport, "shares cached prompts with other engines"),
    }
    for name, (value, use) in given.items():
        if value is not None:
            raise ConfigError(name, f"{use}, and {why}", "leave it out")


def check_backend(name: str) -> None:
    """Raise ConfigError if there is no attention backend of this name."""
    if name not in (*ATTENTION_BACKENDS, VIRTUAL_BACKEND):
        known = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError("attention_backend", f"{name!r} is unknown", f"choose one of {known}")


def _check_numbers(args: EngineArguments) -> None:
    for name in _COUNTS:
        value = getattr(args, name)
        if value is None and name != "block_size":
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
    if share is not None and not 0.0 < share <= 1.0:
        raise ConfigError("gpu_memory_utilization", f"must be in (0, 1], got {share!r}", "0.9 is the default")
    if args.num_kv_blocks is not None and args.kv_cache_memory is not None:
        raise ConfigError("num_kv_blocks", "cannot be given together with kv_cache_memory", "choose one of them")
    if args.kv_cache_memory is not None:
        parse_size("kv_cache_memory", args.kv_cache_memory)


def _check_names(args: EngineArguments) -> None:
    for switch in ("enforce_eager", "enable_sleep_mode", "enable_prefix_caching"):
        value = getattr(args, switch)
        if not isinstance(value, bool) and (value is not None or switch != "enable_prefix_caching"):
            raise ConfigError(switch, f"must be true or false, got {value!r}")
    kind, colon, index = str(args.device).partition(":")
    known = (("auto", ""), ("cpu", ""), ("cuda", ""), ("cuda", ":"))
    if (kind, colon) not in known or (colon and not (index.isascii() and index.isdigit())):
        raise ConfigError("device", f"{args.device!r} is unknown", 'use "auto", "cpu", "cuda" or "cuda:N"')
    if args.dtype != "auto" and args.dtype not in DTYPES:
        raise ConfigError("dtype", f"{args.dtype!r} is unknown", 'use "auto", "float32", "bfloat16" or "float16"')
    check_backend(args.attention_backend)
    if args.quantization not in (None, *QUANTIZATIONS, *STORED_METHODS):
        names = ", ".join(f'"{name}"' for name in QUANTIZATIONS)
        raise ConfigError("quantization", f"{args.quantization!r} is unknown", f"use {names}, or leave it out")
    if args.cpu_weights not in ("auto", *CPU_WEIGHTS):
        names = ", ".join(f'"{name}"' for name in CPU_WEIGHTS)
        raise ConfigError("cpu_weights", f"{args.cpu_weights!r} is unknown", f'use "auto" or one of {names}')
    if args.kv_cache_dtype not in ("auto", *CACHE_DTYPES):
        names = ", ".join(f'"{name}"' for name in CACHE_DTYPES)
        raise ConfigError("kv_cache_dtype", f"{args.kv_cache_dtype!r} is unknown", f'use "auto" or one of {names}')


def _read_layout(name: object, backend: str) -> Literal["paged", "virtual"]:
    """Parse the layout of the KV cache. Raises ConfigError if the name is unknown or the attention backend cannot read
    that layout."""
    if name == "paged":
        if backend == VIRTUAL_BACKEND:
            raise ConfigError(
                "attention_backend", '"virtual" cannot read a paged cache', 'set kv_layout="virtual" instead'
            )
        return "paged"
    if name == "virtual":
        if backend not in ("auto", VIRTUAL_BACKEND):
            reason = f'{backend!r} reads a paged cache, and kv_layout is "virtual"'
            raise ConfigError("attention_backend", reason, "leave one of them out")
        return "virtual"
    raise ConfigError("kv_layout", f"{name!r} is unknown", 'use "paged" or "virtual"')
