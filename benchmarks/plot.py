"""Small SVG plots (curves and stacked bars), drawn without any package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#393b79",
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 520, 320, 64, 36, 44, 150


@dataclass(frozen=True, slots=True)
class Curves:
    """One panel: named curves over a common axis. Values above `ceiling` are cut off."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    ceiling: float | None = None

    def draw(self) -> list[str]:
        points = [point for curve in self.curves.values() for point in curve]
        right = max((x for x, _ in points), default=1.0) or 1.0
        top = max((y for _, y in points), default=1.0) or 1.0
        top = top if self.ceiling is None else min(top, self.ceiling)
        inner_width, inner_height = WIDTH - LEFT - LEGEND, HEIGHT - TOP - BOTTOM

        def place(x: float, y: float) -> tuple[float, float]:
            return LEFT + x / right * inner_width, TOP + (1 - min(y, top) / top) * inner_height

        parts = _frame(self.title, self.x_label, self.y_label)
        for step in range(5):
            share = step / 4
            x, y = place(share * right, share * top)
            parts.append(_text(x, HEIGHT - BOTTOM + 14, _number(share * right), "middle"))
            parts.append(_text(LEFT - 6, y + 4, _number(share * top), "end"))
            parts.append(f'<line x1="{LEFT}" x2="{LEFT + inner_width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        for number, (name, curve) in enumerate(self.curves.items()):
            colour = COLOURS[number % len(COLOURS)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            parts += _key(number, name, colour)
        return parts


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel: one bar per name, of stacked shares whose sum is at most one."""

    title: str
    parts: Sequence[str]
    bars: dict[str, Sequence[float]]
    y_label: str = "share, %"

    def draw(self) -> list[str]:
        inner_width, inner_height = WIDTH - LEFT - LEGEND, HEIGHT - TOP - BOTTOM
        lines = _frame(self.title, "", self.y_label)
        pitch = inner_width / max(len(self.bars), 1)
        for number, (name, shares) in enumerate(self.bars.items()):
            below, x = 0.0, LEFT + number * pitch + 0.15 * pitch
            for place, share in enumerate(shares):
                y, height = TOP + (1 - below - share) * inner_height, share * inner_height
                colour = COLOURS[place % len(COLOURS)]
                size = f'width="{0.7 * pitch:.1f}" height="{height:.1f}"'
                lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
                if share > 0.06:
                    lines.append(_text(x + 0.35 * pitch, y + height / 2 + 4, f"{share:.0%}", "middle", "#fff"))
                below += share
            lower = 12 * (number % 2) if pitch < 60 else 0  # narrow bars: names on two alternating lines
            lines.append(_text(x + 0.35 * pitch, HEIGHT - BOTTOM + 14 + lower, name, "middle"))
        for place, part in enumerate(self.parts):
            lines += _key(place, part, COLOURS[place % len(COLOURS)])
        return lines


def save_plot(path: Path | None, panels: Sequence[Curves | Bars]) -> None:
    """Write the panels side by side, if a path is given."""
    if path is None:
        return
    groups = [
        f'<g transform="translate({number * WIDTH},0)">{"".join(panel.draw())}</g>'
        for number, panel in enumerate(panels)
    ]
    width = WIDTH * len(panels)
    font = 'font-family="sans-serif" font-size="10"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" {font}>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>', *groups, "</svg>\n"]))
    print(f"plot: {path}")


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - LEGEND
    return [
        _text(LEFT, 20, title, "start"),
        _text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle"),
        f'<g transform="translate(14,{(TOP + bottom) / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>',
        f'<path d="M{LEFT},{TOP}V{bottom}H{right}" fill="none" stroke="#333"/>',
    ]


def _key(number: int, name: str, colour: str) -> list[str]:
    x, y = WIDTH - LEGEND + 12, TOP + 8 + 16 * number
    return [f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/>', _text(x + 15, y + 1, name, "start")]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}"
