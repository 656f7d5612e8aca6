"""How the engine runs: frozen sections, resolved once from arguments and hardware facts, printed at start."""

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
LEAST_SAMPLES = 64  # positions sampled from at once even where fewer sequences are let in: drafts have several


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: `num_blocks` blocks of `block_size` token slots."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True  # blocks outlive their sequences and serve prompts that begin alike
    layout: Literal["paged", "virtual"] = "paged"  # virtual: a sequence's blocks are mapped side by side
    eviction: EvictionName = "lru"  # which of the cached blocks that nobody holds goes first
    # Hex digest of all that shapes keys and values besides tokens and salt: weights, dtypes, sizes. It keeps the blocks
    # of models apart where they outlive a process, on disk; within one there is one model.
    namespace: str = ""
    tiers: TierConfig = field(default_factory=TierConfig)  # where blocks go that the device has no room for

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
    """The budgets of one step."""

    max_num_seqs: int = 64  # live sequences (rows)
    max_num_batched_tokens: int = 2_048  # tokens computed in one step
    max_model_len: int = 2_048  # prompt and output together
    policy: PolicyName = "fcfs"
    seed: int = 0
    policy_settings: PolicySettings = field(default_factory=PolicySettings)
    preemption: PreemptionName = "auto"  # what becomes of the blocks of a request that must make room

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}", "raise it")

    @property
    def num_rows(self) -> int:
        """Every live sequence must be able to take one token a step, so rows never outnumber the token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_samples(self) -> int:
        """Positions that are sampled from at once; a step that verifies more does so bit by bit."""
        return max(self.num_rows, LEAST_SAMPLES)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where and in what precision the model runs."""

    device: str  # "cpu", "cuda", "cuda:1"
    dtype: Dtype
    kv_dtype: CacheDtype
    threads: int | None = None  # CPU threads; None: all
    attention_backend: str = "auto"
    enforce_eager: bool = False  # never capture a step as a graph
    quantization: Quantization | None = None  # of the layers' weights, made at load


@dataclass(frozen=True, slots=True)
class EngineConfig:
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    speculation: SpeculationConfig | None = None  # None: one token after the other
    recording: RecordingConfig | None = None  # None: nothing is recorded
