"""Renders all metrics in the text format of Prometheus: the counts of the edges and the stats of the engine."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from quire.config.server import MetricNames
from quire.observability.counts import Counts, Histogram
from quire.observability.metric_table import FINISHED_REASONS, METRICS, PREFIX, VLLM_NAMES, VLLM_PREFIX, Metric
from quire.types.adapters import OTHER_ADAPTERS
from quire.types.stats import STEP_SIZES, TIER_FAILURES, BlockStats, EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(counts: Counts, engine: EngineMetrics, model_name: str, names: MetricNames = "quire") -> bytes:
    """Return the text of every metric in the table, each with the label model_name.

    `names` selects the metrics: "quire" those of Quire, "vllm" those that vLLM has too, under vLLM's names and with its
    label `engine`, and "both" all of these.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    if names != "vllm":
        registry.register(_Collector(counts, engine, {"model_name": model_name}))
    if names != "quire":
        registry.register(_VllmCollector(counts, engine, {"model_name": model_name, "engine": "0"}))
    return generate_latest(registry)


class _Collector:
    """Converts the counts and the engine's values to Prometheus metric families with the labels `labels`."""

    prefix = PREFIX
    metrics = METRICS

    def __init__(self, counts: Counts, engine: EngineMetrics, labels: dict[str, str]) -> None:
        self._counts, self._engine, self._labels = counts, engine, labels

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in self.metrics:
            yield self._histogram(metric) if metric.kind == "histogram" else self._value(metric)

    def _value(self, metric: Metric) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        names = metric.label.split(" ") if metric.label else []
        family = kind(self.prefix + metric.name, metric.help, labels=[*self._labels, *names])
        for label, value in self._values(metric).items():
            labels = label.split(" ", len(names) - 1) if names else []
            family.add_metric([*self._labels.values(), *labels], value)
        return family

    def _values(self, metric: Metric) -> dict[str, float]:
        name = metric.name
        if metric.source == "engine":
            return self._engine.labelled[name] if metric.label else {"": self._engine.values[name]}
        if metric.kind == "gauge":
            return {"": self._counts.gauges[name] + self._engine.values.get(name, 0.0)}
        known = dict.fromkeys(FINISHED_REASONS, 0.0) if metric.label == "finished_reason" else {}
        return known | self._counts.counters[name] if metric.label else {"": self._counts.counters[name].get("", 0.0)}

    def _histogram(self, metric: Metric) -> Family:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        counted = self._engine.steps if metric.source == "engine" else self._counts.histograms[metric.name]
        family = HistogramMetricFamily(self.prefix + metric.name, metric.help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), _buckets(counted, floatToGoString), counted.total)
        return family


class _VllmCollector(_Collector):
    """The metrics that vLLM has too, under vLLM's names."""

    prefix = VLLM_PREFIX
    metrics = tuple(metric for metric in METRICS if metric.name in VLLM_NAMES)


def _buckets(counted: Histogram, format_bound: Callable[[float], str]) -> list[tuple[str, float]]:
    bounds = [*(format_bound(float(bound)) for bound in counted.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counted.counts), strict=True))


class EngineMetrics:
    """The values of all metrics that the engine reports. They are 0 before the first stats arrive, and restart from 0
    with every new engine process."""

    def __init__(self, stats: EngineStats | None, restarts: int, *, is_up: bool) -> None:
        self.steps = Histogram(tuple(float(size) for size in STEP_SIZES))
        self.values = {
            "engine_up": float(is_up),
            "engine_restarts": float(restarts),
            **_values(_NO_STATS if stats is None else stats),
        }
        self.labelled = _labelled(_NO_STATS if stats is None else stats)  # by metric, then by label
        if stats is not None:
            self.steps.counts = list(stats.steps_by_size)
            self.steps.total = float(stats.computed_tokens)


def _values(stats: EngineStats) -> dict[str, float]:
    blocks = stats.blocks
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": blocks.used / blocks.total if blocks.total else 0.0,
        "kv_cache_capacity_tokens": blocks.total * blocks.block_size,
        "kv_cache_waste_perc": blocks.waste,
        "engine_sleep_level": stats.sleep_level,
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
        "lora_adapters": stats.adapters.loaded,
        "lora_slots": stats.adapters.slots,
        "lora_slots_used": stats.adapters.slots_used,
        "lora_requests_waiting": stats.adapters.waiting,
        "lora_placements": stats.adapters.placements,
    }


def _labelled(stats: EngineStats) -> dict[str, dict[str, float]]:
    tiers = stats.tiers
    moved: dict[str, float] = {
        "saved": tiers.saved,
        "loaded": tiers.loaded,
        "stored": tiers.stored,
        "fetched": tiers.fetched,
        "put": tiers.put,
        "got": tiers.got,
    }
    behind = {"host": stats.host_hits, "disk": stats.disk_hits, "remote": stats.remote_hits}
    return {
        "prefix_cache_tier_hits": {"device": stats.prefix_hits - sum(behind.values()), **behind},
        "cache_tier_used_blocks": {"host": tiers.host_used, "disk": tiers.disk_used},
        "cache_tier_moved_blocks": moved,
        "cache_tier_moved_bytes": {way: count * tiers.block_bytes for way, count in moved.items()},
        "cache_tier_evicted_blocks": {"host": tiers.host_evicted, "disk": tiers.disk_evicted},
        "cache_tier_failures": dict.fromkeys(TIER_FAILURES, 0.0) | tiers.failures,
        "lora_requests": {OTHER_ADAPTERS: 0.0} | stats.adapters.requests,
    }


_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0, BlockStats(0, 0, 0, 0, 0, 0))
