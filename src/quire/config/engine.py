"""The configuration of an engine, in frozen sections. `resolve_engine_config` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.config.model import CacheDtype, Dtype, Quantization
from quire.config.policy import PolicyName, PolicySettings
from quire.config.recording import RecordingConfig
from quire.config.speculation import SpeculationConfig
from quire.config.tiers import EvictionName, PreemptionName, TierConfig
from quire.types.errors import ConfigError

MAX_BLOCK_SIZE = 256
LEAST_SAMPLES = 64  # a step can sample from so many positions even if rows are fewer: a draft needs several per row


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: `num_blocks` blocks of `block_size` token slots."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True  # keep blocks of finished sequences for prompts with the same prefix
    layout: Literal["paged", "virtual"] = "paged"  # virtual: blocks of a sequence are mapped to contiguous addresses
    eviction: EvictionName = "lru"  # the order in which cached blocks without holders are evicted
    # A hex digest of all that keys and values depend on besides tokens and salt: weights, dtypes, sizes. It separates
    # the blocks of different models on disk, where blocks outlive the process. Without a disk tier it is empty.
    namespace: str = ""
    tiers: TierConfig = field(
        default_factory=TierConfig
    )  # host memory and disk for blocks that do not fit on the device

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
    preemption: PreemptionName = (
        "auto"  # whether a preempted request's blocks are copied to host memory or computed again
    )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}", "raise it")

    @property
    def num_rows(self) -> int:
        """The number of rows. Every running sequence computes at least one token per step, so rows never exceed the
        token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_samples(self) -> int:
        """The number of positions that are sampled from at once. A step with more of them samples in several rounds."""
        return max(self.num_rows, LEAST_SAMPLES)


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


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of an engine."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    speculation: SpeculationConfig | None = None  # None: no speculative decoding
    recording: RecordingConfig | None = None  # None: nothing is recorded
