"""Runs as one HTML page that needs nothing else: a lane for each request, memory and step times below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from quire.simulator.run import Run
from quire.simulator.summary import summarize
from quire.simulator.timeline import STATES, Span, State, timeline

COLOURS: dict[State, str] = {
    "waiting": "#c8c8c8",
    "prefill": "#e8a33d",
    "decode": "#3d85c6",
    "preempted": "#cc3333",
    "swapped": "#8e5bb5",
}
WIDTH, LEFT, LANE, GAP, GRAPH = 1_100, 170, 12, 3, 90  # pixels
MAX_LANES = 5_000
MAX_POINTS = 1_000
_STYLE = """body{font:13px sans-serif;margin:20px;color:#222}svg{display:block;margin:8px 0 24px}
text{font:11px sans-serif;fill:#444}table{border-collapse:collapse}td,th{padding:2px 12px;text-align:right}
td:first-child{text-align:left}i{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px}"""


def render(title: str, runs: Sequence[Run]) -> str:
    """The page."""
    key = "".join(f'<i style="background:{COLOURS[state]}"></i>{state}' for state in STATES)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_summary(runs)}<p>{key}</p>",
    ]
    for run in runs:
        parts += [f"<h2>{escape(run.name)}</h2>", _lanes(run)]
    return "\n".join([*parts, "</body></html>\n"])


def _summary(runs: Sequence[Run]) -> str:
    found = [summarize(run) for run in runs]
    rows: list[tuple[str, list[str]]] = [
        ("requests finished", [f"{each['finished']} of {each['requests']}" for each in found]),
        ("out tokens/s", [f"{each['output_tokens_per_second']:.1f}" for each in found]),
        ("preemptions", [str(each["preemptions"]) for each in found]),
    ]
    for name in ("ttft", "latency"):
        for figure in ("p50", "p99"):
            rows.append((f"{name} {figure}, s", [f"{each[name].get(figure, 0.0):.3f}" for each in found]))
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = "".join(f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows)
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _lanes(run: Run) -> str:
    told = timeline(run)
    shown = told[:MAX_LANES]
    scale = (WIDTH - LEFT) / run.seconds if run.seconds > 0 else 0.0
    pitch = LANE + GAP
    parts = []
    for place, (outcome, spans) in enumerate(shown):
        top = place * pitch
        label = escape(outcome.request_id[-24:])
        parts.append(f'<text x="{LEFT - 6}" y="{top + LANE - 2}" text-anchor="end">{label}</text>')
        parts += [_rect(span, run.begin, scale, top, outcome.request_id) for span in spans]
    bottom = len(shown) * pitch + 16
    parts += _graph(run, bottom, scale)
    note = f"<p>{len(told) - len(shown)} more requests are not drawn.</p>" if len(shown) < len(told) else ""
    height = bottom + 2 * (GRAPH + 30)
    return f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>{note}'


def _rect(span: Span, begin: float, scale: float, top: int, request_id: str) -> str:
    x, width = LEFT + (span.start - begin) * scale, max((span.end - span.start) * scale, 0.5)
    times = f"{span.start - begin:.3f} to {span.end - begin:.3f} s"
    said = escape(f"{request_id}: {span.state}, {times}" + (f"\n{span.why}" if span.why else ""))
    size = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}"'
    return f'<rect {size} fill="{COLOURS[span.state]}"><title>{said}</title></rect>'


def _graph(run: Run, top: int, scale: float) -> list[str]:
    """Blocks in use, and how long steps took."""
    used = [(step.end, step.num_used / run.cache.num_blocks) for step in run.steps]
    longest = max((step.end - step.start for step in run.steps), default=0.0) or 1.0
    took = [(step.end, (step.end - step.start) / longest) for step in run.steps]
    panels = [
        (f"blocks in use, of {run.cache.num_blocks}", used, "#3d85c6"),
        (f"step time, up to {1e3 * longest:.1f} ms", took, "#666"),
    ]
    parts = []
    for number, (name, points, colour) in enumerate(panels):
        base = top + (number + 1) * GRAPH + number * 30
        line = " ".join(
            f"{LEFT + (at - run.begin) * scale:.1f},{base - value * GRAPH:.1f}" for at, value in _thin(points)
        )
        parts.append(f'<path d="M{LEFT},{base - GRAPH}V{base}H{WIDTH}" fill="none" stroke="#999"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT}" y="{base + 14}">{escape(name)}; {run.seconds:.3f} s in all</text>')
    return parts


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them: the highest of each bucket."""
    stride = -(-len(points) // MAX_POINTS) or 1
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]
