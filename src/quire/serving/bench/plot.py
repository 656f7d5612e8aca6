"""Draws the cumulative distributions of the latencies of several runs as a small SVG, without a library or script, for
light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 360, 220, 46
_COLOURS = ("#2f6fde", "#d9822b", "#2a9d6f", "#b3479b", "#8a6d3b", "#5b6bbf", "#c2413b", "#4a8f9e")
_MAX_POINTS = 240
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.grid{stroke:#ccc;stroke-width:1}.line{fill:none;stroke-width:2}"
    ".paper{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.paper{fill:#161616}}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: the cumulative distribution of each labelled run. Values are milliseconds."""

    title: str
    runs: tuple[tuple[str, tuple[float, ...]], ...]


def draw(panels: Sequence[Panel], title: str) -> str:
    """Return an SVG with the panels in two columns and one legend."""
    rows = math.ceil(len(panels) / 2)
    labels = list(dict.fromkeys(label for panel in panels for label, _ in panel.runs))
    height = 40 + rows * _HEIGHT + 24 + 18 * len(labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{2 * _WIDTH}" height="{height}"/>',
        f'<text x="16" y="26" font-weight="600">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        x, y = place % 2 * _WIDTH, 40 + place // 2 * _HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel, labels)}</g>')
    for place, label in enumerate(labels):
        y = 40 + rows * _HEIGHT + 18 * place + 14
        parts.append(f'<rect x="{_MARGIN}" y="{y - 9}" width="18" height="4" fill="{_colour(place)}"/>')
        parts.append(f'<text x="{_MARGIN + 26}" y="{y - 3}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, labels: Sequence[str]) -> str:
    values = [value for _, run in panel.runs for value in run if value > 0]
    left, right, top, bottom = _MARGIN, _WIDTH - 14, 18, _HEIGHT - 34
    parts = [f'<text x="{left}" y="8">{escape(panel.title)}</text>']
    if not values:
        return "".join([*parts, f'<text x="{left}" y="{(top + bottom) / 2}">no values</text>'])
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = math.floor(low * 2) / 2, max(math.ceil(high * 2) / 2, math.floor(low * 2) / 2 + 0.5)

    def across(value: float) -> float:
        return left + (math.log10(max(value, 10**low)) - low) / (high - low) * (right - left)

    for share in (0, 50, 90, 100):
        y = bottom - share / 100 * (bottom - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{share}%</text>')
    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for label, run in panel.runs:
        points = " ".join(
            f"{across(value):.1f},{bottom - share * (bottom - top):.1f}" for value, share in _cumulative(run)
        )
        parts.append(f'<polyline class="line" stroke="{_colour(labels.index(label))}" points="{points}"/>')
    return "".join(parts)


def _cumulative(run: Sequence[float]) -> list[tuple[float, float]]:
    """Return values with the share of all values up to each, thinned out to at most 241 points."""
    ordered = sorted(run)
    places = sorted({round(i * (len(ordered) - 1) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)})
    return [(ordered[place], (place + 1) / len(ordered)) for place in places] if ordered else []


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    steps = (1,) if high - low > 3 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]
