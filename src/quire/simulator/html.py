"""Renders runs as one self-contained HTML page: one lane per request, and graphs of memory and step times."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from quire.simulator.run import Outcome, Run
from quire.simulator.text import shorten, summary_rows
from quire.simulator.timeline import STATES, Span, State, timeline

COLOURS: dict[State, str] = {
    "waiting": "#c8c8c8",
    "prefill": "#e8a33d",
    "decode": "#3d85c6",
    "preempted": "#cc3333",
    "swapped": "#8e5bb5",
}
WIDTH, LEFT, RIGHT, TOP, LANE, GAP, GRAPH = 1_120, 170, 20, 18, 12, 3, 90  # pixels
MAX_LANES = 5_000
MAX_POINTS = 1_000
MAX_TICKS = 10
_FAULT = 90  # characters of an error in a lane
_STYLE = """body{font:13px sans-serif;margin:20px;color:#222}svg{display:block;margin:8px 0 24px}
text{font:11px sans-serif;fill:#444}.bad{fill:#a00}table{border-collapse:collapse}
td,th{padding:2px 12px;text-align:right}td:first-child{text-align:left}
i{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px}"""


class _Axis(NamedTuple):
    """Maps times of a run to pixels. All runs of a page have the same scale."""

    begin: float
    seconds: float  # of the longest run

    @property
    def scale(self) -> float:
        return (WIDTH - LEFT - RIGHT) / self.seconds if self.seconds > 0 else 0.0

    def x(self, at: float) -> float:
        return LEFT + (at - self.begin) * self.scale

    def ticks(self) -> list[float]:
        """Return the tick positions: round numbers of seconds since the beginning."""
        if self.seconds <= 0:
            return [0.0]
        power = 10.0 ** floor(log10(self.seconds / MAX_TICKS))
        step = next(power * each for each in (1, 2, 5, 10, 20) if power * each * MAX_TICKS >= self.seconds)
        return [number * step for number in range(int(self.seconds / step) + 1)]


def render(title: str, runs: Sequence[Run]) -> str:
    """Return the HTML page."""
    key = "".join(f'<i style="background:{COLOURS[state]}"></i>{state}' for state in STATES)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_summary(runs)}<p>{key}</p>",
    ]
    longest = max((run.seconds for run in runs), default=0.0)
    for run in runs:
        parts += [f"<h2>{escape(run.name)}</h2>", _lanes(run, _Axis(run.begin, longest))]
    return "\n".join([*parts, "</body></html>\n"])


def _summary(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in summary_rows(runs))
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _lanes(run: Run, axis: _Axis) -> str:
    requests = timeline(run)
    shown = requests[:MAX_LANES]
    bottom = TOP + len(shown) * (LANE + GAP)
    parts = _ticks(axis, bottom)
    for place, (outcome, spans) in enumerate(shown):
        top = TOP + place * (LANE + GAP)
        label = escape(shorten(outcome.request_id))
        parts.append(f'<text x="{LEFT - 6}" y="{top + LANE - 2}" text-anchor="end">{label}</text>')
        parts += [_rect(span, axis, top, outcome.request_id) for span in spans]
        if outcome.fault is not None:
            parts.append(_fault(outcome, axis, top))
    parts += _graph(run, bottom + 16, axis)
    note = f"<p>{len(requests) - len(shown)} more requests are not drawn.</p>" if len(shown) < len(requests) else ""
    height = bottom + 16 + 2 * (GRAPH + 30)
    return f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>{note}'


def _ticks(axis: _Axis, bottom: int) -> list[str]:
    """Return SVG elements: the labels above the lanes, in seconds, and the lines through the lanes."""
    parts = []
    for seconds in axis.ticks():
        x = axis.x(axis.begin + seconds)
        parts.append(f'<text x="{x:.1f}" y="{TOP - 7}" text-anchor="middle">{seconds:.6g} s</text>')
        parts.append(f'<path d="M{x:.1f},{TOP - 4}V{bottom}" stroke="#e4e4e4"/>')
    return parts


def _rect(span: Span, axis: _Axis, top: int, request_id: str) -> str:
    x, width = axis.x(span.start), max((span.end - span.start) * axis.scale, 0.5)
    times = f"{span.start - axis.begin:.3f} to {span.end - axis.begin:.3f} s"
    tooltip = escape(f"{request_id}: {span.state}, {times}" + (f"\n{span.why}" if span.why else ""))
    size = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"'
    return f'<rect {size} fill="{COLOURS[span.state]}"><title>{tooltip}</title></rect>'


def _fault(outcome: Outcome, axis: _Axis, top: int) -> str:
    """Return the SVG text that says why a request was refused or failed, next to the time at which that happened."""
    x = axis.x(outcome.ended_at or outcome.arrival)
    label = f"{'refused' if outcome.refused else 'failed'}: {outcome.fault}"
    fits = x + 6 * min(len(label), _FAULT) < WIDTH
    place, anchor = (x + 4, "start") if fits else (x - 4, "end")
    where = f'class="bad" x="{place:.1f}" y="{top + LANE - 2}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(shorten(label, _FAULT))}<title>{escape(label)}</title></text>"


def _graph(run: Run, top: int, axis: _Axis) -> list[str]:
    """Return the SVG graphs of used blocks and step times."""
    used = [(step.end, step.num_used / run.cache.num_blocks) for step in run.steps]
    longest = max((step.end - step.start for step in run.steps), default=0.0)
    took = [(step.end, (step.end - step.start) / (longest or 1.0)) for step in run.steps]
    panels = [
        (f"blocks in use, of {run.cache.num_blocks}", used, "#3d85c6"),
        (f"step time, up to {1e3 * longest:.1f} ms", took, "#666"),
    ]
    parts, seconds = [], run.seconds
    for number, (name, points, colour) in enumerate(panels):
        base = top + (number + 1) * GRAPH + number * 30
        line = " ".join(f"{axis.x(at):.1f},{base - value * GRAPH:.1f}" for at, value in _thin(points))
        parts.append(f'<path d="M{LEFT},{base - GRAPH}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#999"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT}" y="{base + 14}">{escape(name)}; {seconds:.3f} s in all</text>')
    return parts


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MAX_POINTS points: the highest of each bucket."""
    stride = -(-len(points) // MAX_POINTS) or 1
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]
