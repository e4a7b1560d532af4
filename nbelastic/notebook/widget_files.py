"""The files of the dashboard's widget: one module and one style sheet, which `npm run build` in widgets/ makes."""

from __future__ import annotations

from pathlib import Path


def widget_text(name: str) -> str:
    """Return the content of a file in static/."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")
