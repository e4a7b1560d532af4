"""How long each rank's steps took without waiting for others, over the last minutes of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import RankStepTimes, StepTimes

SPAN = 5.0  # seconds of one column
COLUMNS = 180
LONGEST = 12  # columns that one report may cover: steps may take longer than a column


class _Row:
    """The times of a slot: milliseconds by the number of the column."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self._last: tuple[WorkerId, int, int] | None = None  # the worker, generation and column of the last report

    def add(self, w: WorkerId, generation: int, own: float, column: int) -> None:
        """A report covers the time since the last one of its worker in this generation."""
        first = column
        if self._last is not None and self._last[:2] == (w, generation) and column - self._last[2] <= LONGEST:
            first = min(column, self._last[2] + 1)
        self.times.update(dict.fromkeys(range(first, column + 1), own))
        self._last = (w, generation, column)

    def keep(self, newest: int) -> None:
        """Drop what is too old, and what is in the future since the clock was set back."""
        for column in [each for each in self.times if not newest - COLUMNS < each <= newest]:
            del self.times[column]


class StepTimeTable:
    """Of one job. A slot keeps its row when its worker is replaced."""

    def __init__(self) -> None:
        self._members: Sequence[WorkerId] = ()  # of the newest world that has reported, by rank
        self._rows: dict[tuple[str, int], _Row] = {}  # by host and slot
        self._newest = 0

    def add(self, w: WorkerId, members: Sequence[WorkerId], generation: int, own: float, at: float) -> None:
        """A member has reported `own` milliseconds; `at`: seconds since 1970."""
        self._members, newest = members, int(at // SPAN)
        self._rows.setdefault((w.host, w.slot), _Row()).add(w, generation, own, newest)
        if newest != self._newest:
            self._newest = newest
            for row in self._rows.values():
                row.keep(newest)
            self._rows = {slot: row for slot, row in self._rows.items() if row.times}

    def show(self, text: Callable[[WorkerId], str]) -> StepTimes:
        """All rows, by rank. `text(worker)`: what is said of a slow one. The newest column may still lack reports: then it is left out."""
        empty = _Row()
        rows = [(w, self._rows.get((w.host, w.slot), empty).times) for w in self._members]
        known = sorted({column for _, times in rows for column in times})
        counts = [sum(column in times for _, times in rows) for column in known[-2:]]
        if len(counts) == 2 and counts[1] < counts[0]:
            known.pop()
        columns = range(known[0], known[-1] + 1) if known else range(0)
        ranks = [
            RankStepTimes(str(w), rank, tuple(map(times.get, columns)), text(w)) for rank, (w, times) in enumerate(rows)
        ]
        return StepTimes(SPAN, columns.stop * SPAN, tuple(ranks))
