"""The table and the chart of the page: pure functions of the values of all traces."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

Values = Mapping[str, list[float]]  # figure: one value per round
Results = Mapping[str, Mapping[str, Values]]  # trace, system
COLOURS = {"nbelastic": "#2f5d8a", "torchrun": "#c8793a", "torchft": "#6b9a57"}
LEFT, WIDTH, BAR, GAP, TOP = 120, 560, 18, 16, 46


def table(results: Results) -> str:
    """Return a Markdown table with a line per trace and system: median (lowest–highest)."""
    figures = list(dict.fromkeys(name for systems in results.values() for found in systems.values() for name in found))
    lines = ["| schedule | system | " + " | ".join(figures) + " |", "|---" * (len(figures) + 2) + "|"]
    for trace, systems in results.items():
        for system, found in systems.items():
            cells = (spread(found.get(name, [])) for name in figures)
            lines.append(f"| {trace} | {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    digits = 0 if all(float(value).is_integer() for value in values) else 1
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f}" + (f" ({low:.{digits}f}–{high:.{digits}f})" if len(values) > 1 else "")


def chart(results: Results, figure: str = "goodput, %") -> str:
    """Return an SVG with a bar per trace and system: the median of a percentage, and a line over its range."""
    parts, y = [], TOP
    for trace, systems in results.items():
        parts.append(f'<text x="{LEFT - 10}" y="{y + BAR * len(systems) / 2 + 5}" text-anchor="end">{trace}</text>')
        for system, found in systems.items():
            parts += bar(system, found.get(figure, []), y)
            y += BAR
        y += GAP
    named = list(dict.fromkeys(system for systems in results.values() for system in systems))
    for number, system in enumerate(named):
        x = LEFT + 110 * number
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{COLOURS[system]}"/>')
        parts.append(f'<text x="{x + 18}" y="25">{system}</text>')
    size = f'viewBox="0 0 {LEFT + WIDTH + 70} {y}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="13" role="img"'
    )
    title = f' aria-label="{figure} by schedule and system">'
    return "\n".join([head + title, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def bar(system: str, values: list[float], y: int) -> list[str]:
    if not values:
        return [f'<text x="{LEFT + 4}" y="{y + 13}" fill="#555">{system}: no result</text>']
    low, middle, high = (WIDTH * v / 100 for v in (min(values), statistics.median(values), max(values)))
    line = f'<path d="M{LEFT + low:.1f} {y + 8}H{LEFT + high:.1f}" stroke="#222" stroke-width="1.5"/>'
    return [
        f'<rect x="{LEFT}" y="{y}" width="{middle:.1f}" height="{BAR - 2}" fill="{COLOURS[system]}"/>',
        *([line] if high > low else []),
        f'<text x="{LEFT + max(middle, high) + 6:.1f}" y="{y + 13}">{statistics.median(values):.1f}</text>',
    ]
