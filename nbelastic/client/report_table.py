"""What `cluster.reports` returns: a list of rows, which a notebook shows as charts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from nbelastic.protocol.report_history import PLACE, ReportHistory
from nbelastic.system.line_charts import Line, Mark, line_charts

CHARTS = 3


class ReportTable(list[dict[str, float | None]]):
    """A list of rows, for `pandas.DataFrame`. A cell that ends with it shows the first numbers as charts over the steps."""

    def __init__(self, history: ReportHistory) -> None:
        super().__init__(history.records())

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """One line of text: a notebook need not save all numbers beside the charts."""
        printer.text(self._summary())

    def _repr_svg_(self) -> str | None:
        names = self._names()
        if not names:
            return None
        lines = [Line(name, [row[name] for row in self]) for name in names[:CHARTS]]
        return line_charts([_place(row) for row in self], lines, self._changes(), self._summary())

    def _names(self) -> list[str]:
        """The names that have numbers."""
        names = list(self[0])[len(PLACE) :] if self else []
        return [name for name in names if any(row[name] is not None for row in self)]

    def _changes(self) -> list[Mark]:
        """The changes of the world, as the dashboard marks them."""
        worlds = [(_place(row), row["generation"], row["size"]) for row in self]
        return [
            Mark(place, f"{before:g}→{size:g}", size < before)
            for (_, _, before), (place, _, size) in pairwise(worlds)
            if before != size and before is not None and size is not None
        ]

    def _summary(self) -> str:
        rows = f"{len(self)} row{'s' * (len(self) != 1)}"
        return f"{rows} of {', '.join(self[0])}" if self else "no reports"


def _place(row: dict[str, float | None]) -> float:
    return next(iter(row.values())) or 0.0
