"""The table of a run, for docs/gpu.md."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 160  # characters of a value or an error


def markdown(lines: list[dict[str, Any]]) -> str:
    """One row per result; the environment comes first, as one paragraph."""
    surroundings = [
        f"{line['name']} {line['value']}" for line in lines if line["part"] == "environment" and "value" in line
    ]
    rows = [
        "; ".join(text for text in surroundings if len(text) < MAX_TEXT),
        "",
        "| part | what | result |",
        "|---|---|---|",
    ]
    for line in lines:
        if line["part"] == "environment" or (line["name"] == "whole part" and line["ok"] and "skipped" not in line):
            continue
        name = "–" if line["name"] == "whole part" else line["name"]
        rows.append(f"| `{line['part']}` | {name} | {_result(line)} |")
    return "\n".join(rows)


def _result(line: dict[str, Any]) -> str:
    known = ("part", "name", "ok", "min", "median", "max", "count", "unit", "seconds", "error", "skipped")
    parts = []
    if "skipped" in line:
        parts.append(f"not run: {line['skipped']}")
    if not line["ok"]:
        parts.append(f"**failed**: {line.get('error', '')}")
    if "median" in line:
        parts.append(f"{line['min']} / **{line['median']}** / {line['max']} {line['unit']} ({line['count']})")
    parts += [f"{name} {value}" for name, value in line.items() if name not in known]
    text = "; ".join(parts) or f"yes, in {line['seconds']} s"
    return text.replace("\n", " ").replace("|", "\\|")[:MAX_TEXT]
