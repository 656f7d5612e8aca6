"""The bundled dashboard asks for metrics that exist, by the names and labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from quire.observability.metric_table import METRICS

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/quire.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_a_metric_that_is_exposed() -> None:
    exposed = set()
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        exposed |= {metric.exposed + suffix for suffix in suffixes}
    used = {name for query in QUERIES for name in re.findall(r"quire:\w+", query)}
    assert used
    assert used <= exposed


def test_every_label_a_query_groups_by_exists() -> None:
    labels = {name for metric in METRICS for name in (metric.label or "").split()} | {"le", "model_name"}
    groups = [names for query in QUERIES for names in re.findall(r"by \(([\w, ]+)\)", query)]
    assert {name for names in groups for name in names.split(", ")} <= labels


def test_every_metric_that_counts_requests_or_tokens_is_somewhere_on_it() -> None:
    shown = " ".join(QUERIES)
    absent = [metric.name for metric in METRICS if metric.exposed not in shown]
    constant = {"kv_cache_capacity_tokens"}
    assert set(absent) - constant <= {"request_params_n", "request_params_max_tokens", "request_inference_time_seconds"}


def test_the_guide_lists_every_metric() -> None:
    guide = (ROOT / "docs/guides/observability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(quire:\w+)`", guide))
    assert named == {metric.exposed for metric in METRICS}


def test_the_guide_describes_every_metric_in_the_words_of_its_help_text() -> None:
    guide = (ROOT / "docs/guides/observability.md").read_text(encoding="utf-8")
    missing = [m.name for m in METRICS if f"| `{m.exposed}` | {m.kind} | {m.help}" not in guide]
    assert not missing
