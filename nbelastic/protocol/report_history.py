"""The history of what rank 0 reported in a job, bounded in size. The driver keeps it, and clients keep copies."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

MAX_ROWS = 2000
MAX_NAMES = 16
PLACE = ("step", "time", "generation", "size")  # the first values of each row

Row = list[float | None]


class ReportRows(Struct, frozen=True):
    """Rows of a history from place `start` on. Each is step, time, generation, size, and the values of `names`, in order.

    `time`: seconds since 1970. None: the value was not reported, or is infinite or NaN. A short row lacks the last names.
    If `version` differs from the one that the receiver has, `start` is 0 and all rows are new.
    """

    version: str = ""
    start: int = 0
    names: tuple[str, ...] = ()
    rows: list[Row] = []


class ReportHistory:
    """The reports of one job in at most `MAX_ROWS` rows.

    Each row stands for the same number of reports: it has the place of the last one, and the means of the finite values.
    A training that returns to an earlier commit replaces the rows after it. One thread writes; others may read.
    """

    def __init__(self, known: ReportRows | None = None, reports_per_row: int = 1) -> None:
        self._known = known or ReportRows()  # all rows; replaced as a whole, except that rows are appended
        self.reports_per_row = reports_per_row
        self._pending: list[Row] = []  # reports of the next row
        self._newest = _step(self.rows[-1]) if self.rows else -1  # the step of the newest report
        self._world: Row = self.rows[-1][2:4] if self.rows else []  # generation and size of the newest report
        self._replace_rows(self.rows)

    @property
    def rows(self) -> list[Row]:
        return self._known.rows

    @property
    def names(self) -> tuple[str, ...]:
        return self._known.names

    @property
    def version(self) -> str:
        return self._known.version

    def add(self, place: Sequence[float], values: Mapping[str, float | str]) -> None:
        """Add a report, unless it is the second one of a step. `place`: step, time, generation and size.

        Text, and names beyond `MAX_NAMES`, are left out.
        """
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        step = place[0]
        if not numbers or step == self._newest:
            return
        if step < self._newest:
            self._pending = [row for row in self._pending if _step(row) < step]
            self._replace_rows([row for row in self.rows if _step(row) < step])
        self._newest = step
        new = tuple(name for name in numbers if name not in self.names)[: MAX_NAMES - len(self.names)]
        if new:
            self._known = replace(self._known, names=self.names + new)
        if self._world[:1] != [place[2]]:  # a report may come after a loss, before the next generation
            self._world = [*place[2:]]
        self._pending.append([step, place[1], *self._world, *(_finite(numbers.get(name)) for name in self.names)])
        if len(self._pending) < self.reports_per_row:
            return
        self.rows.append(_mean(self._pending))
        self._pending = []
        if len(self.rows) >= MAX_ROWS:
            self.reports_per_row *= 2
            self._replace_rows([_mean(self.rows[i : i + 2]) for i in range(0, len(self.rows), 2)])

    def since(self, version: str, count: int) -> ReportRows:
        """Return the rows that a receiver lacks which has `count` rows of `version`."""
        known = self._known
        start = min(count, len(known.rows)) if version == known.version else 0
        return replace(known, start=start, rows=known.rows[start:])

    def apply(self, new: ReportRows) -> None:
        """As a copy: take in rows of the original."""
        kept = self.rows[: new.start] if new.version == self.version else []
        self._known = replace(new, start=0, rows=kept + new.rows)

    def records(self) -> Iterator[dict[str, float | None]]:
        """Each row as a dict. Its place is a `commit` if the program reports a `step` of its own."""
        known = self._known
        place = ("commit", *PLACE[1:]) if "step" in known.names else PLACE
        columns = place + known.names
        for row in list(known.rows):
            yield dict(zip(columns, row + [None] * (len(columns) - len(row)), strict=True))

    def _replace_rows(self, rows: list[Row]) -> None:
        """Receivers get all rows anew. The version is random: histories of other jobs and drivers have others."""
        self._known = replace(self._known, version=os.urandom(4).hex(), rows=rows)


def _step(row: Row) -> float:
    return row[0] or 0.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(rows: Sequence[Row]) -> Row:
    """Return the place of the last row, and the means of the values."""
    first = len(PLACE)
    width = max(len(row) for row in rows)
    columns = [[value for row in rows if i < len(row) and (value := row[i]) is not None] for i in range(first, width)]
    return [*rows[-1][:first], *(_finite(sum(values) / len(values)) if values else None for values in columns)]
