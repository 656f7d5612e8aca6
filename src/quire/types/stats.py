"""The engine's condition at one moment, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStats:
    """The paged cache. Waste is the share of allocated slots that hold no token."""

    total: int
    used: int
    shared: int
    free: int
    slots_used: int
    slots_allocated: int

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
