"""Tables in plain text and in HTML, for places without widgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in plain text; empty without rows."""
    table = [columns, *rows]
    if len(table) == 1:
        return ""
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as HTML, with a caption; all values are escaped."""
    left = 'style="text-align: left"'  # JupyterLab's tables are aligned to the right
    head = "".join(f'<th scope="col" {left}>{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return ""
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
