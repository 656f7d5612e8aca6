"""The engine's condition at one moment, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def waste(self) -> float:
        return 1 - self.slots_used / self.slots_allocated if self.slots_allocated else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, except `running`, `waiting` and `blocks`, which are now. Times are seconds."""

    steps: int
    running: int
    waiting: int
    finished: int
    preemptions: int
    prompt_tokens: int  # computed in chunks, recomputation included
    output_tokens: int
    step_seconds: float  # total over all steps, launch to commit
    last_step_seconds: float
    blocks: BlockStats
    computed_tokens: int = 0  # by all steps, prompts and decodes
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # entry i: steps above bound i - 1, up to bound i
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # those that were found there
    drafted_tokens: int = 0  # guesses that were verified
    accepted_tokens: int = 0  # those that turned out right
    drafts: int = 0  # steps of a sequence in which there was something to verify


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
