"""Statistics of the engine, and a map of its KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types.adapters import NO_ADAPTERS, AdapterStats

STEP_SIZES = tuple(2**i for i in range(21))  # upper bounds of the buckets by which steps are counted, in tokens


@dataclass(frozen=True, slots=True)
class BlockStats:
    """The KV blocks on the device. `used` blocks are held by a sequence; all others are `free`, including `cached`
    ones.

    `waste` is the share of allocated token slots that hold no token.
    """

    total: int
    used: int
    shared: int
    free: int
    slots_used: int
    slots_allocated: int
    cached: int = 0
    pinned: int = 0  # held by pinned prefixes
    block_size: int = 0  # token slots per block

    @property
    def waste(self) -> float:
        return 1 - self.slots_used / self.slots_allocated if self.slots_allocated else 0.0


TIER_FAILURES = (
    "full",  # the disk is full
    "io",  # reading or writing a file failed
    "missing",  # another process deleted the file
    "corrupt",  # the checksum of a file is wrong
    "slow",  # a load took too long, so the tokens were computed instead
    "queue",  # not written: too many writes are pending
    "host_full",  # not saved: all slots in host memory are held
    "transport_full",  # a block was not sent to other engines: the KV transport has no room
    "transport_io",  # the KV transport, or the connection to another engine, failed
    "transport_missing",  # another engine no longer has the block
    "transport_corrupt",  # the checksum, model or layout of a received block is wrong
    "transport_timeout",  # another engine did not answer in time
    "transport_queue",  # not sent or looked up: too many requests are pending
)


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tiers behind the device, in blocks. `*_blocks`, `*_used` and `*_held` are current values; the other fields
    are counters.

    `failures` counts failed and skipped copies by reason. A failure costs time and never changes a result.
    """

    host_blocks: int = 0
    host_used: int = 0
    host_held: int = 0  # held for a preempted request, or being copied
    disk_blocks: int = 0
    disk_used: int = 0
    saved: int = 0  # copied from device to host
    loaded: int = 0  # copied from host to device
    stored: int = 0  # copied from host to disk
    fetched: int = 0  # copied from disk to host
    host_evicted: int = 0
    disk_evicted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    block_bytes: int = 0
    put: int = 0  # sent from host memory to other engines
    got: int = 0  # received from other engines into host memory


NO_TIERS = TierStats()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of the engine: counters since its start, except `running`, `waiting`, `pinned_prefixes`, `blocks`
    and `sleep_level`, which are current values. Times are in seconds."""

    steps: int
    running: int
    waiting: int
    finished: int
    preemptions: int
    prompt_tokens: int  # computed in chunks, including tokens computed again
    output_tokens: int
    step_seconds: float  # sum over all steps, from launch to commit
    blocks: BlockStats
    computed_tokens: int = 0  # of prompts and decodes, in all steps
    steps_by_size: tuple[int, ...] = (0,) * (
        len(STEP_SIZES) + 1
    )  # entry i: tokens in (STEP_SIZES[i - 1], STEP_SIZES[i]]
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
    evicted_blocks: int = 0  # blocks evicted from the prefix cache
    pinned_prefixes: int = 0
    host_hits: int = 0  # the part of prefix_hits that was loaded from host memory
    disk_hits: int = 0  # the part of prefix_hits that was read from disk
    remote_hits: int = 0  # the part of prefix_hits that another engine sent
    swaps: int = 0  # preemptions that copied blocks to host memory
    tiers: TierStats = NO_TIERS
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    drafts: int = 0  # drafts that were verified
    adapters: AdapterStats = NO_ADAPTERS
    sleep_level: int = 0  # 0: awake

    @property
    def prefix_hit_rate(self) -> float:
        """The share of looked-up prompt tokens that were found in the prefix cache."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks that one live request holds. `state` is "running", "waiting" or "preempted"."""

    request_id: str
    state: str
    num_tokens: int  # computed so far, over all samples
    block_ids: tuple[int, ...]  # each block once


@dataclass(frozen=True, slots=True)
class BlockMap:
    """All KV blocks at one moment. `holders[i]` is the number of sequences that hold block i; 0: free or cached."""

    step: int
    block_size: int
    holders: tuple[int, ...]
    requests: tuple[RequestBlocks, ...]
    cached: tuple[int, ...] = ()  # blocks without holders in the prefix cache, least recently used first
