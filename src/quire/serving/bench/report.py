"""The output of a benchmark: a table on the terminal, JSON, or a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import __version__
from quire.serving.bench.plot import Panel, draw
from quire.serving.bench.timeline import Timeline
from quire.types.errors import ConfigError

_ROWS = (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token"), ("itl_ms", "between events"),
         ("e2e_ms", "end to end"))  # fmt: skip


def describe(summary: dict[str, Any]) -> str:
    """Return one run as a table for the terminal."""
    done = f"{summary['completed']} of {summary['requests']} requests in {summary['duration_s']:.1f} s"
    output, total = summary["output_tokens_per_s"], summary["total_tokens_per_s"]
    speed = (
        f"{summary['requests_per_s']:.2f} requests/s, {output:.1f} output tokens/s, {total:.1f} tokens/s with prompts"
    )
    lines = [f"{summary['label']}: {done}", f"  {speed}"]
    lines += [f"  failed {error['count']} x: {error['message']}" for error in summary["errors"]]
    lines.append(f"  {'ms':<24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")))
    for key, name in _ROWS:
        spread = summary[key]
        if spread is not None:
            values = "".join(f"{spread[column]:>10.1f}" for column in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"  {name:<24}{values}")
    if summary["goodput_requests_per_s"] is not None:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in summary["objectives_ms"].items())
        share = summary["goodput_share"]
        lines.append(f"  goodput {summary['goodput_requests_per_s']:.2f} requests/s ({share:.1%}) within {bounds}")
    lag = summary["client"]["loop_lag_ms"]
    if lag is not None:
        lines.append(f"  this client was late by {lag['p50']:.2f} ms (p50), {lag['p99']:.2f} ms (p99)")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """Return facts about the machine on which a benchmark runs."""
    return {
        "quire": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
    }


def write_json(path: str, report: dict[str, Any]) -> None:
    _write(path, json.dumps(report, indent=1) + "\n")


def write_plot(path: str, title: str, runs: Sequence[tuple[str, Sequence[Timeline]]]) -> None:
    """Write an SVG with four cumulative diagrams and a line for each run. Raises ConfigError."""
    good = [(label, [timeline for timeline in run if timeline.error is None]) for label, run in runs]
    panels = [
        Panel("time to first token, ms", _values(good, lambda one: [one.ttft])),
        Panel("time per output token, ms", _values(good, lambda one: [one.tpot] if one.tpot is not None else [])),
        Panel("between events, ms", _values(good, lambda one: one.gaps)),
        Panel("end to end, ms", _values(good, lambda one: [one.latency])),
    ]
    _write(path, draw(panels, title))


def _values(runs: Sequence[tuple[str, list[Timeline]]], of: Any) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((label, tuple(value * 1e3 for one in run for value in of(one))) for label, run in runs)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", f"{path} cannot be written: {error.strerror}") from None
