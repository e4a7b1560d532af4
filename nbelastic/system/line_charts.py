"""Line charts as SVG, for places without widgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 300, 200  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 54, 24  # what is around the plot
MOST, LEAST = 1e300, 1e-300  # of a value, and of a range: beyond them floats overflow
CLOSE = 28  # between two marks: less than the width of a text


class Mark(NamedTuple):
    """A dashed line at `x`, with a text above it. A `bad` one is red."""

    x: float
    text: str
    bad: bool


class Line(NamedTuple):
    """The points of one chart, by their order; a value of None is a gap."""

    name: str
    values: Sequence[float | None]


def line_charts(x: Sequence[float], lines: Sequence[Line], marks: Sequence[Mark], label: str) -> str:
    """Return the lines as charts beside one another, all over the same `x` with the same marks."""
    charts = "".join(
        f'<g transform="translate({i * WIDTH} 0)">{_chart(x, line, marks)}</g>' for i, line in enumerate(lines)
    )
    width = WIDTH * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" role="img"'
        f' aria-label="{escape(label)}" font-family="sans-serif" font-size="11" fill="#444">'
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>{charts}</svg>'
    )


def _chart(x: Sequence[float], line: Line, marks: Sequence[Mark]) -> str:
    known = [value for value in line.values if value is not None]
    across = _Axis(min(x), max(x), LEFT, WIDTH - RIGHT)
    up = _Axis(min(known), max(known), HEIGHT - BOTTOM, TOP)
    title = f'<text x="8" y="16" font-size="12" fill="#111">{escape(line.name)} <tspan font-weight="bold">{known[-1]:.4g}</tspan></text>'
    parts = [title]
    for tick in up.ticks():
        parts.append(f'<path d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    bottom = [f'<text x="{across(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:,g}</text>' for x in across.ticks()]
    parts += bottom + _marks(marks, across)
    parts.append(f'<path d="{_path(x, line, across, up)}" fill="none" stroke="#1e88e5" stroke-width="1.5"/>')
    return "".join(parts)


def _marks(marks: Sequence[Mark], across: _Axis) -> list[str]:
    """Neighbours that are close have their texts one above the other."""
    parts, last, above = [], -math.inf, False
    for mark in marks:
        color, place = "#c62828" if mark.bad else "#2e7d32", across(mark.x)
        above = place - last < CLOSE and not above
        y = TOP - (22 if above else 10)
        parts.append(f'<path d="M{place:.1f} {y + 4}V{HEIGHT - BOTTOM}" stroke="{color}" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{place:.1f}" y="{y}" fill="{color}" text-anchor="middle">{escape(mark.text)}</text>')
        last = place
    return parts


def _path(x: Sequence[float], line: Line, across: _Axis, up: _Axis) -> str:
    path, pen = "", "M"
    for place, value in zip(x, line.values, strict=True):
        if value is not None:
            path += f"{pen}{across(place):.1f} {up(value):.1f}"
        pen = "M" if value is None else "L"
    return path


class _Axis:
    """Where a value is in the picture, between `start` and `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        low, high = _clipped(low), _clipped(high)
        self.low, self.high = low, high if high - low > LEAST else low + max(1.0, abs(low) * 1e-6)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (_clipped(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Two to five round numbers."""
        power = 10.0 ** math.floor(math.log10(self.high - self.low))
        count = (self.high - self.low) / power  # from 1 to 10
        step = power * (0.5 if count < 2 else 1 if count < 5 else 2)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, math.floor(self.high / step) + 1)]


def _clipped(value: float) -> float:
    return min(max(value, -MOST), MOST)
