"""What the engine says of itself, as metrics. Its counters begin at zero again with every engine process."""

from __future__ import annotations

from quire.observability.tally import Histogram
from quire.types.stats import STEP_SIZES, TIER_FAILURES, BlockStats, EngineStats


class EngineView:
    """The values of all metrics the engine is the source of. Without stats (there were none yet) they are zero."""

    def __init__(self, stats: EngineStats | None, restarts: int, *, is_up: bool) -> None:
        self.steps = Histogram(tuple(float(size) for size in STEP_SIZES))
        self.values = {
            "engine_up": float(is_up),
            "engine_restarts": float(restarts),
            **_values(_NONE if stats is None else stats),
        }
        self.labelled = _labelled(_NONE if stats is None else stats)  # by metric, then by label
        if stats is not None:
            self.steps.counts = list(stats.steps_by_size)
            self.steps.total = float(stats.computed_tokens)


def _values(stats: EngineStats) -> dict[str, float]:
    blocks = stats.blocks
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": blocks.used / blocks.total if blocks.total else 0.0,
        "kv_cache_waste_perc": blocks.waste,
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "prefix_cache_evicted_blocks": stats.evicted_blocks,
        "prefix_cache_pinned_blocks": blocks.pinned,
        "prefix_cache_pinned_prefixes": stats.pinned_prefixes,
        "cache_tier_held_blocks": stats.tiers.host_held,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "num_preemptions": stats.preemptions,
        "num_swaps": stats.swaps,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.output_tokens,
        "engine_steps": stats.steps,
        "engine_step_seconds": stats.step_seconds,
    }


def _labelled(stats: EngineStats) -> dict[str, dict[str, float]]:
    tiers = stats.tiers
    moved: dict[str, float] = {
        "saved": tiers.saved,
        "loaded": tiers.loaded,
        "stored": tiers.stored,
        "fetched": tiers.fetched,
    }
    on_device = stats.prefix_hits - stats.host_hits - stats.disk_hits
    return {
        "prefix_cache_tier_hits": {"device": on_device, "host": stats.host_hits, "disk": stats.disk_hits},
        "cache_tier_used_blocks": {"host": tiers.host_used, "disk": tiers.disk_used},
        "cache_tier_moved_blocks": moved,
        "cache_tier_moved_bytes": {way: count * tiers.block_bytes for way, count in moved.items()},
        "cache_tier_evicted_blocks": {"host": tiers.host_evicted, "disk": tiers.disk_evicted},
        "cache_tier_failures": dict.fromkeys(TIER_FAILURES, 0.0) | tiers.failures,
    }


_NONE = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0, BlockStats(0, 0, 0, 0, 0, 0))
