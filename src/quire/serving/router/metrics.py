"""The router's /metrics page: its own metrics, and those of all replicas with the label `replica`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from quire.serving.router.proxy import ProxyCounts
from quire.serving.router.replica import Replica

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.+)")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


def own_metrics(replicas: Sequence[Replica], counts: ProxyCounts, num_connections: int) -> Iterator[str]:
    """Yield the lines of the router's own metrics."""
    yield from _metric("quire_router:requests_total", "counter", "Requests forwarded to replicas.", counts.requests)
    yield from _metric("quire_router:retries_total", "counter", "Attempts of requests after the first.", counts.retries)
    yield from _metric("quire_router:refused_total", "counter", "Requests that no replica answered.", counts.refused)
    yield from _metric("quire_router:errors_total", "counter", "Requests that the router refused.", counts.errors)
    yield from _metric("quire_router:stale_connections_total", "counter",
                    "Requests sent again because a reused connection was closed.", counts.stale)  # fmt: skip
    yield from _metric("quire_router:connections", "gauge", "Open client connections.", num_connections)
    table = (
        ("replica_up", "gauge", "Whether a replica takes requests.", lambda one: int(one.takes_requests)),
        ("replica_in_flight", "gauge", "Requests of this router in flight at a replica.", lambda one: one.load),
        ("replica_requests_total", "counter", "Requests sent to a replica.", lambda one: one.counts.requests),
        ("replica_failures_total", "counter", "Requests that a replica failed before the first byte.",
         lambda one: one.counts.failures),
        ("replica_broken_total", "counter", "Responses of a replica that ended early.", lambda one: one.counts.broken),
        ("replica_busy_total", "counter", "Requests that a replica refused with 429 or 503.",
         lambda one: one.counts.busy),
        ("replica_health_failures_total", "counter", "Failed health checks of a replica.",
         lambda one: one.counts.health_failures),
        ("replica_prompt_bytes_total", "counter", "Bytes of prompts sent to a replica.",
         lambda one: one.counts.prompt_bytes),
        ("replica_matched_bytes_total", "counter", "Bytes of prompts that the router expected in a replica's cache.",
         lambda one: one.counts.matched_bytes),
        ("replica_tree_bytes", "gauge", "Bytes of prompts in the router's prefix tree of a replica.",
         lambda one: one.tree.num_bytes),
    )  # fmt: skip
    for name, kind, text, value in table:
        yield from _head(f"quire_router:{name}", kind, text)
        yield from (f'quire_router:{name}{{replica="{one.name}"}} {value(one)}' for one in replicas)
    yield from _head("quire_router:replica_chosen_total", "counter", "Requests sent to a replica, by reason.")
    for one in replicas:
        for reason, count in one.counts.by_reason.items():
            yield f'quire_router:replica_chosen_total{{replica="{one.name}",reason="{reason}"}} {count}'


def merge_metrics(own: Iterator[str], pages: Mapping[str, str]) -> bytes:
    """Return one page: the router's lines, then the metric families of all replicas, with the label `replica` added to
    each sample. `pages`: the /metrics text by replica name."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        described: set[str] = set()
        for line in page.splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2] if line.count(" ") >= 2 else ""
                if line.startswith(("# HELP ", "# TYPE ")):
                    described.add(name)
                    lines = heads.setdefault(name, [])
                    if line not in lines and not any(old[:7] == line[:7] for old in lines):
                        lines.append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                given = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(_family(name, described), []).append(f"{name}{{{given}}} {value}")
    lines = [*own]
    for name, found_samples in samples.items():
        lines += heads.get(name, [])
        lines += found_samples
    return ("\n".join(lines) + "\n").encode()


def _family(sample: str, described: set[str]) -> str:
    if sample in described:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample.removesuffix(suffix) in described:
            return sample.removesuffix(suffix)
    return sample


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"{name} {value}"
