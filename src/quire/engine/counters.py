"""Counts steps and tokens, and makes the EngineStats."""

from __future__ import annotations

from quire.config.engine import CacheConfig
from quire.engine.adapters import AdapterTable
from quire.engine.paced_results import PacedResults
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.stats import STEP_SIZES, BlockStats, EngineStats
from quire.types.step import StepPlan


class Counters:
    """Counters since the start of the engine. Times are in seconds."""

    def __init__(self) -> None:
        self.steps = self.finished = self.output_tokens = 0
        self._prompt_tokens = self._computed_tokens = 0
        self._steps_by_size = [0] * (len(STEP_SIZES) + 1)
        self._step_seconds = 0.0

    def note_plan(self, plan: StepPlan, num_tokens: int) -> None:
        """Count the tokens of a plan, `num_tokens` in all."""
        if chunks := plan.chunks:
            num_drafted = sum([chunk[4] for chunk in chunks]) - len(chunks)
            self._prompt_tokens += num_tokens - len(plan.decode_rows) - num_drafted
        self._computed_tokens += num_tokens
        self._steps_by_size[min(max(num_tokens - 1, 0).bit_length(), len(STEP_SIZES))] += 1

    def note_step(self, seconds: float, num_outputs: int) -> None:
        """Count a step whose result came `seconds` after its launch, with `num_outputs` generated tokens."""
        self.steps += 1
        self.output_tokens += num_outputs
        self._step_seconds += seconds

    def stats(
        self, scheduler: Scheduler, paced: PacedResults, cache: CacheConfig, adapters: AdapterTable, sleep_level: int
    ) -> EngineStats:
        pool, pins, reuse = scheduler.pool, scheduler.pins, scheduler.reuse
        blocks = BlockStats(
            total=pool.num_blocks,
            used=pool.num_used,
            shared=pool.num_shared + (0 if pool.names_memory else scheduler.tree.num_shared),
            free=pool.num_free,
            slots_used=scheduler.slots_used(),
            slots_allocated=pool.num_used * cache.block_size,
            cached=pool.num_reusable,
            pinned=pins.num_blocks,
            block_size=cache.block_size,
        )
        return EngineStats(
            steps=self.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            finished=self.finished,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self.output_tokens + paced.num_searched,
            step_seconds=self._step_seconds,
            blocks=blocks,
            computed_tokens=self._computed_tokens,
            steps_by_size=tuple(self._steps_by_size),
            prefix_queries=reuse.num_queries,
            prefix_hits=reuse.num_hits,
            evicted_blocks=pool.num_evicted,
            pinned_prefixes=len(pins),
            host_hits=reuse.tier_hits["host"],
            disk_hits=reuse.tier_hits["disk"],
            remote_hits=reuse.tier_hits["remote"],
            swaps=scheduler.preemption.num_swaps,
            tiers=scheduler.tiers.stats(),
            drafted_tokens=paced.num_drafted,
            accepted_tokens=paced.num_accepted,
            drafts=paced.num_drafts,
            adapters=adapters.stats(),
            sleep_level=sleep_level,
        )
