"""The engine's condition at one moment, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_SIZES = tuple(2**i for i in range(21))  # tokens; the bounds by which steps are counted


@dataclass(frozen=True, slots=True)
class BlockStats:
    """The paged cache. Waste is the share of allocated slots that hold no token.

    `used` blocks are held by a sequence; all others are `free`, even those `cached` for prompts to come.
    """

    total: int
    used: int
    shared: int
    free: int
    slots_used: int
    slots_allocated: int
    cached: int = 0
    pinned: int = 0  # held for resident prefixes

    @property
    def waste(self) -> float:
        return 1 - self.slots_used / self.slots_allocated if self.slots_allocated else 0.0


TIER_FAILURES = (
    "full",  # the disk has no room for a file
    "io",
    "missing",  # somebody else deleted the file
    "corrupt",
    "slow",  # computed instead of waited for
    "queue",  # not written, as too many were being written
    "host_full",  # not saved, as all slots were held
)


@dataclass(frozen=True, slots=True)
class TierStats:
    """What lies beyond the device. Blocks are counted since the start, except totals, `used` and `held`, which are now.

    `failures` counts by reason what a tier could not do; each cost time and nothing else.
    """

    host_blocks: int = 0
    host_used: int = 0
    host_held: int = 0  # parked by a request that waits, or being moved
    disk_blocks: int = 0
    disk_used: int = 0
    saved: int = 0  # device to host
    loaded: int = 0  # and back
    stored: int = 0  # host to disk
    fetched: int = 0  # and back
    host_evicted: int = 0
    disk_evicted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    block_bytes: int = 0


NO_TIERS = TierStats()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, except `running`, `waiting`, `pinned_prefixes` and `blocks`, which are now. Times are
    seconds."""

    steps: int
    running: int
    waiting: int
    finished: int
    preemptions: int
    prompt_tokens: int  # computed in chunks, recomputation included
    output_tokens: int
    step_seconds: float  # total over all steps, launch to commit
    blocks: BlockStats
    computed_tokens: int = 0  # by all steps, prompts and decodes
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # entry i: steps above bound i - 1, up to bound i
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # those that were found there
    evicted_blocks: int = 0  # cached blocks that were given away
    pinned_prefixes: int = 0  # prompts that stay resident now
    host_hits: int = 0  # of those hits, tokens that were loaded from host memory
    disk_hits: int = 0  # and tokens that a file had been read for
    swaps: int = 0  # preemptions that moved blocks to host memory
    tiers: TierStats = NO_TIERS
    drafted_tokens: int = 0  # guesses that were verified
    accepted_tokens: int = 0  # those that turned out right
    drafts: int = 0  # steps of a sequence in which there was something to verify

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens looked up that need not be computed."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """One live request's hold on the cache. `state` is "running", "waiting" or "preempted"."""

    request_id: str
    state: str
    num_tokens: int  # computed so far, all samples
    block_ids: tuple[int, ...]  # without repeats


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block at one moment: `holders[i]` counts the sequences that hold block i; 0 is free or cached."""

    step: int
    block_size: int
    holders: tuple[int, ...]
    requests: tuple[RequestBlocks, ...]
    cached: tuple[int, ...] = ()  # blocks that nobody holds and a prompt may find, least recently used first
