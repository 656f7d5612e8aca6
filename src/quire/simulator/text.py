"""Formats runs as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.simulator.run import Outcome, Run
from quire.simulator.summary import Change, compare, summarize
from quire.simulator.timeline import Span, State, timeline

LANE = 40  # characters
MARKS: dict[State, str] = {"waiting": ".", "prefill": "=", "decode": "#", "preempted": "x", "swapped": "s"}
KEY = "  ".join(f"{mark} {state}" for state, mark in MARKS.items())


def show_run(run: Run, rows: int) -> str:
    """Return the summary of a run and the timelines of its first `rows` requests (0: all)."""
    requests, begin, seconds = timeline(run), run.begin, run.seconds
    shown = requests[:rows] if rows else requests
    header = ["request", "arrived", "waited", "TTFT", "end", "out", "preempted", "why", "timeline"]
    lines = [[*_request_row(outcome, spans, begin), _lane(spans, begin, seconds)] for outcome, spans in shown]
    parts = [show_summary([run]), table(header, lines, left=(0, 7, 8)), f"timeline: {KEY}"]
    if len(shown) < len(requests):
        parts.append(f"{len(requests) - len(shown)} more requests: --rows 0 shows all")
    return "\n\n".join(parts)


def show_summary(runs: Sequence[Run]) -> str:
    """Return a table of the summaries of runs, side by side."""
    return table(["", *(run.name for run in runs)], summary_rows(runs))


def summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the summary table: the name of each value, and the value in every run."""
    found = [summarize(run) for run in runs]
    rows = [
        ["requests finished", *(f"{each['finished']} of {each['requests']}" for each in found)],
        ["seconds", *(f"{each['seconds']:.3f}" for each in found)],
        ["out tokens/s", *(f"{each['output_tokens_per_second']:.1f}" for each in found)],
        ["steps", *(str(each["steps"]) for each in found)],
        ["preemptions", *(str(each["preemptions"]) for each in found)],
        ["prompt tokens cached", *(str(each["cached_tokens"]) for each in found)],
        ["blocks in use", *(f"{each['blocks_used']:.1%}" for each in found)],
    ]
    for name, shown in (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "latency")):
        for figure in ("mean", "p50", "p90", "p99", "max"):
            rows.append([f"{shown} {figure}", *(_seconds(each[name].get(figure)) for each in found)])
    for name in ("failed", "refused"):
        if any(each[name] for each in found):
            rows.append([name, *(str(each[name]) for each in found)])
    return rows


def show_changes(before: Run, after: Run, rows: int) -> str:
    """Return the summaries of two runs, and the requests that changed most between them."""
    changes = compare(before, after)
    counts = Counter(change.verdict for change in changes)
    shares = ", ".join(f"{counts[name]} {name}" for name in ("faster", "slower", "same", "only in one") if counts[name])
    header = ["request", f"TTFT {before.name}", after.name, "end", after.name, "change", "preempted"]
    moved = [change for change in changes if change.verdict != "same"]
    half = (rows + 1) // 2
    shown = moved if not rows or len(moved) <= rows else [*moved[:half], *moved[half - rows + len(moved) :]]
    title = f"from {before.name} to {after.name}: {shares}"
    parts = [show_summary([before, after]), title]
    if shown:
        parts.append(table(header, [_change_row(change) for change in shown]))
    if len(shown) < len(moved):
        parts.append(f"{len(moved) - len(shown)} more that changed: --rows 0 shows all")
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a table with aligned columns. The columns in `left` are aligned left, the others right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        aligned = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _request_row(outcome: Outcome, spans: list[Span], begin: float) -> list[str]:
    end = outcome.ended_at
    return [
        shorten(outcome.request_id),
        _seconds(outcome.arrival - begin),
        _seconds(outcome.waited),
        _seconds(outcome.ttft),
        _seconds(None if end is None else end - begin),
        str(outcome.num_outputs),
        str(outcome.num_preemptions),
        shorten(_reason(outcome, spans), 32),
    ]


def _change_row(change: Change) -> list[str]:
    before, after, moved = change.before, change.after, change.latency
    return [
        shorten(before.request_id),
        _seconds(before.ttft),
        _seconds(after.ttft),
        _seconds(before.latency),
        _seconds(after.latency),
        "-" if moved is None else f"{moved:+.3f}s",
        f"{before.num_preemptions} -> {after.num_preemptions}",
    ]


def _reason(outcome: Outcome, spans: list[Span]) -> str:
    """Return why a request failed, or the reason for its longest wait."""
    if outcome.fault is not None:
        return outcome.fault
    stopped = [span for span in spans if span.state in ("waiting", "preempted", "swapped")]
    longest = max(stopped, key=lambda span: span.end - span.start, default=None)
    return "" if longest is None else longest.why.removeprefix("in the queue").removeprefix("; ")


def _lane(spans: list[Span], begin: float, seconds: float) -> str:
    scale = LANE / seconds if seconds > 0 else 0.0
    lane = [" "] * LANE
    for span in spans:
        first = min(int((span.start - begin) * scale), LANE - 1)
        last = min(max(int((span.end - begin) * scale), first + 1), LANE)
        lane[first:last] = MARKS[span.state] * (last - first)
    return "".join(lane)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}s"


def shorten(text: str, length: int = 24) -> str:
    """Cut a text to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
