"""What the engine says of itself, as metrics. Its counters begin at zero again with every engine process."""

from __future__ import annotations

from quire.observability.tally import Histogram
from quire.types.stats import STEP_SIZES, BlockStats, EngineStats


class EngineView:
    """The values of all metrics the engine is the source of. Without stats (there were none yet) they are zero."""

    def __init__(self, stats: EngineStats | None, restarts: int, *, is_up: bool) -> None:
        self.steps = Histogram(tuple(float(size) for size in STEP_SIZES))
        self.values = {
            "engine_up": float(is_up),
            "engine_restarts": float(restarts),
            **_values(_NONE if stats is None else stats),
        }
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
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.output_tokens,
        "engine_steps": stats.steps,
        "engine_step_seconds": stats.step_seconds,
    }


_NONE = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, BlockStats(0, 0, 0, 0, 0, 0))
