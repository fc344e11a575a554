"""Plots as SVG text: lines over steps or sites, on a logarithmic axis. Colours are CSS variables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 62
#: Labels along the horizontal axis at most.
_LABELS = 16


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: told where the pointer rests on it.
        values: one for each place along the axis; what is zero or infinite lies on the edge.
        colour: name of a CSS variable, e.g. ``first``.
        dot: radius of the dot that each value is too; 0 for none.
    """

    name: str
    values: Sequence[float]
    colour: str
    dot: float = 0


@dataclass(frozen=True)
class _Scale:
    """Where a value lies: decades from `low` to `high`, `count` places along."""

    low: int
    high: int
    count: int

    def x(self, place: int) -> float:
        room = WIDTH - _LEFT - _RIGHT
        return _LEFT + (room / 2 if self.count < 2 else room * place / (self.count - 1))

    def y(self, value: float) -> float:
        power = self.low if value <= 0 or value != value else self.high if value == inf else log10(value)
        share = (min(max(power, self.low), self.high) - self.low) / (self.high - self.low)
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share)


def log_plot(title: str, series: Sequence[Series], labels: Sequence[str], bar: float | None = None) -> str:
    """Lines over places, the vertical axis in decades.

    Args:
        title: what the plot is of; read out for those who cannot see it.
        series: lines of equal length.
        labels: one for each place.
        bar: drawn across, where there is one.
    """
    scale = _scale(series, bar, len(labels))
    parts = [*_grid(scale), *_ticks(scale, labels)]
    if bar is not None and 0 < bar < inf:
        y = scale.y(bar)
        parts.append(f'<line class="bar" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="bar-label" x="{WIDTH - _RIGHT}" y="{y - 4:.1f}">bar {bar:g}</text>')
    parts += [part for one in series for part in _line(scale, one, labels)]
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _scale(series: Sequence[Series], bar: float | None, count: int) -> _Scale:
    values = [value for one in series for value in one.values if 0 < value < inf]
    values += [bar] if bar is not None and 0 < bar < inf else []
    low, high = floor(log10(min(values, default=1e-6))), ceil(log10(max(values, default=1.0)))
    return _Scale(low, max(high, low + 1), count)


def _grid(scale: _Scale) -> list[str]:
    step = max(1, (scale.high - scale.low) // 8)
    parts: list[str] = []
    for power in range(scale.low, scale.high + 1, step):
        y = scale.y(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick-y" x="{_LEFT - 8}" y="{y + 4:.1f}">1e{power}</text>')
    return parts


def _ticks(scale: _Scale, labels: Sequence[str]) -> list[str]:
    step = max(1, ceil(len(labels) / _LABELS))
    base = HEIGHT - _BOTTOM + 16
    return [
        f'<text class="tick-x" transform="translate({scale.x(place):.1f} {base}) rotate(-30)">{escape(label)}</text>'
        for place, label in enumerate(labels)
        if place % step == 0
    ]


def _line(scale: _Scale, series: Series, labels: Sequence[str]) -> list[str]:
    points = [(scale.x(place), scale.y(value)) for place, value in enumerate(series.values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'style="--line: var(--{series.colour})"'
    parts = [f'<polyline class="line" {style} points="{path}"><title>{escape(series.name)}</title></polyline>']
    for (x, y), value, label in zip(points, series.values, labels, strict=True) if series.dot else ():
        told = escape(f"{label}, {series.name}: {value:.3g}")
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{series.dot:g}"'
        parts.append(f'<circle class="dot" {style} {place}><title>{told}</title></circle>')
    return parts
