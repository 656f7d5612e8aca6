"""The counts in Prometheus's text format."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from quire.observability.catalogue import FINISHED_REASONS, METRICS, PREFIX, Metric
from quire.observability.engine_view import EngineView
from quire.observability.tally import Histogram, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(tally: Tally, engine: EngineView, model_name: str) -> bytes:
    """Every metric of the catalogue, each with the label model_name."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tally, engine, model_name))
    return generate_latest(registry)


class _Collector:
    def __init__(self, tally: Tally, engine: EngineView, model_name: str) -> None:
        self._tally, self._engine, self._model_name = tally, engine, model_name

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield self._histogram(metric) if metric.kind == "histogram" else self._value(metric)

    def _value(self, metric: Metric) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        labels = ["model_name", *([metric.label] if metric.label else [])]
        family = kind(PREFIX + metric.name, metric.help, labels=labels)
        for label, value in self._values(metric).items():
            family.add_metric([self._model_name, *([label] if metric.label else [])], value)
        return family

    def _values(self, metric: Metric) -> dict[str, float]:
        name = metric.name
        if metric.source == "engine":
            return self._engine.labelled[name] if metric.label else {"": self._engine.values[name]}
        if metric.kind == "gauge":
            return {"": self._tally.gauges[name] + self._engine.values.get(name, 0.0)}
        known = dict.fromkeys(FINISHED_REASONS, 0.0) if metric.label == "finished_reason" else {}
        return known | self._tally.counters[name] if metric.label else {"": self._tally.counters[name].get("", 0.0)}

    def _histogram(self, metric: Metric) -> Family:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        counted = self._engine.steps if metric.source == "engine" else self._tally.histograms[metric.name]
        family = HistogramMetricFamily(PREFIX + metric.name, metric.help, labels=["model_name"])
        family.add_metric([self._model_name], _buckets(counted, floatToGoString), counted.total)
        return family


def _buckets(counted: Histogram, written: object) -> list[tuple[str, float]]:
    assert callable(written)
    bounds = [*(written(float(bound)) for bound in counted.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counted.counts), strict=True))
