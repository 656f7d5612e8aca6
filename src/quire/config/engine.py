"""The configuration of an engine, in frozen sections, and the sizes of the steps that it captures as CUDA graphs.

`resolve_engine_config` makes the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.adapters import AdapterConfig
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.model import CacheDtype, CpuWeights, Dtype, ModelConfig, Quantization
from quire.config.parallel import NO_PARALLEL, ParallelConfig
from quire.config.policy import PolicyName, PolicySettings
from quire.config.recording import RecordingConfig
from quire.config.speculation import MAX_TOKENS, SpeculationConfig
from quire.config.tiers import EvictionName, PreemptionName, TierConfig
from quire.config.vision import ImageLimits
from quire.types.errors import ConfigError

MAX_BLOCK_SIZE = 256
MIN_SAMPLES = 1 + MAX_TOKENS  # positions that a step samples at once even with fewer rows: one row's longest draft fits

GRAPH_ROWS = 1024  # decode rows of the largest graph
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, GRAPH_ROWS)
# (limit, gap): up to `limit` tokens, buckets are `gap` tokens apart, so that padding wastes little of a step.
_TOKEN_BUCKETS = ((64, 16), (512, 64), (2048, 128), (8192, 512))
# Seconds that the host needs per layer without a graph, and operations a second of the device's gemms in large steps.
# Launching the kernels of a layer takes about 790 us on the host of an H200 (22 ms for a step of 28 layers), and the
# same thread plans the next step: the device idles unless its kernels take longer than both, about 1.2 ms a layer. With
# 1,500 short requests at once and no captured steps, it idled for half of the time with a 1.5B model and for 38 % with
# a 3B model. Layers that round their rows to 8 bits (fp8, int8) have more kernels and faster gemms.
_LAUNCH_SECONDS, _FLOPS = 1.2e-3, 6e14
_W8A8_LAUNCH_SECONDS, _W8A8_FLOPS = 1.8e-3, 1.2e15


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: `num_blocks` blocks of `block_size` token slots."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True  # keep blocks of finished sequences for prompts with the same prefix
    layout: Literal["paged", "virtual"] = "paged"  # virtual: blocks of a sequence are mapped to contiguous addresses
    eviction: EvictionName = "lru"  # the order in which cached blocks without holders are evicted
    # A hex digest of everything besides tokens and salt that determines keys and values: weights, dtypes, sizes. It
    # separates the blocks of different models on disk, where blocks outlive the process. Without a disk tier: empty.
    namespace: str = ""
    tiers: TierConfig = field(default_factory=TierConfig)  # host and disk tiers
    groups: KVGroups = PLAIN  # of layers that keep different things

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(
                "block_size", f"must be in [1, {MAX_BLOCK_SIZE}], got {self.block_size}", "16 suits most loads"
            )
        if self.num_blocks < 1:
            raise ConfigError(
                "num_kv_blocks", f"must be at least 1, got {self.num_blocks}", "raise it or kv_cache_memory"
            )

    @property
    def num_slots(self) -> int:
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step, and the policy that chooses what runs in it."""

    max_num_seqs: int = 64  # sequences that run at once (rows)
    max_num_batched_tokens: int = 2_048  # tokens computed in one step
    max_model_len: int = 2_048  # prompt and output together
    policy: PolicyName = "fcfs"
    seed: int = 0
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    preemption: PreemptionName = "auto"  # whether a preempted request's blocks are swapped out or recomputed
    images: ImageLimits | None = None  # None: requests have no images
    adapter_slots: int = 0  # different LoRA adapters among running requests; 0: there are none
    host_adapters: int = 0  # LoRA adapters that the executor keeps in host memory; 0: all
    # Running requests are divided into so many micro-batches, which are in flight together: as many as the pipeline has
    # stages.
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}", "raise it")

    @property
    def num_rows(self) -> int:
        """The number of rows. Every running sequence computes at least one token per step, so rows never exceed the
        token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_samples(self) -> int:
        """The number of positions that a step samples at once. With more positions it samples in several rounds."""
        return max(self.num_rows, MIN_SAMPLES)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device that runs the model, and the data types on it."""

    device: str  # "cpu", "cuda", "cuda:1"
    dtype: Dtype
    kv_dtype: CacheDtype
    threads: int | None = None  # CPU threads; None: all
    attention_backend: str = "auto"
    enforce_eager: bool = False  # never capture steps as CUDA graphs
    quantization: Quantization | None = None  # of the layers' weights, quantized while loading
    cpu_weights: CpuWeights = "integer"  # how a CPU multiplies rows by quantized weights
    sleep: bool = False  # a GPU's weights and KV cache are allocated so that they can be given back

    @property
    def integer_gemms(self) -> bool:
        """Whether a CPU multiplies rows by quantized weights in whole numbers."""
        return self.cpu_weights != "float"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of an engine."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    speculation: SpeculationConfig | None = None  # None: no speculative decoding
    recording: RecordingConfig | None = None  # None: nothing is recorded
    adapters: AdapterConfig | None = None  # None: no LoRA adapters
    parallel: ParallelConfig = NO_PARALLEL  # how it is split over ranks


def row_buckets(num_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows for which decode steps are captured, if a step has at most `num_rows`."""
    return (*(bucket for bucket in _ROW_BUCKETS if bucket < num_rows), min(num_rows, GRAPH_ROWS))


def token_buckets(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of tokens to which all other steps are padded and for which they are captured. A larger step
    needs no graph: its kernels take longer to run than to launch."""
    is_w8a8 = config.device.quantization in ("fp8", "int8")
    flops, seconds = (_W8A8_FLOPS, _W8A8_LAUNCH_SECONDS) if is_w8a8 else (_FLOPS, _LAUNCH_SECONDS)
    launch_bound = model.num_layers * seconds * flops / (2 * model.num_active)
    most = min(int(launch_bound), config.scheduler.max_num_batched_tokens)
    buckets, last = [], 0
    for limit, gap in _TOKEN_BUCKETS:
        buckets += [bucket for bucket in range(last + gap, limit + 1, gap) if bucket - gap < most]
        last = limit
    return tuple(buckets)
