"""The files of the dashboard: its widget, and the page of `nbelastic dashboard`. `npm run build` in widgets/ makes them."""

from __future__ import annotations

from pathlib import Path


def widget_text(name: str) -> str:
    """Return the content of a file in static/."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")
