"""How long each rank's steps took without waiting for others, over the last minutes of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import RankStepTimes, StepTimes

SPAN = 5.0  # seconds of one column
COLUMNS = 180


class StepTimeTable:
    """Of one job. A slot keeps its row when its worker is replaced."""

    def __init__(self) -> None:
        self._members: Sequence[WorkerId] = ()  # of the newest world that has reported, by rank
        self._rows: dict[
            tuple[str, int], dict[int, float]
        ] = {}  # by host and slot: milliseconds by number of the column

    def add(self, w: WorkerId, members: Sequence[WorkerId], own: float, at: float) -> None:
        """A member has reported `own` milliseconds; `at`: seconds since 1970."""
        newest = int(at // SPAN)
        row = self._rows.setdefault((w.host, w.slot), {})
        row[newest] = own
        for column in [each for each in row if each <= newest - COLUMNS]:
            del row[column]
        self._members = members

    def show(self, text: Callable[[WorkerId], str]) -> StepTimes:
        """All rows, by rank. `text(worker)`: what is said of a slow one."""
        rows = [(w, self._rows.get((w.host, w.slot), {})) for w in self._members]
        newest = max((column for _, row in rows for column in row), default=0)
        oldest = min((column for _, row in rows for column in row if column > newest - COLUMNS), default=1)
        columns = range(oldest, newest + 1)
        ranks = [
            RankStepTimes(str(w), rank, tuple(map(row.get, columns)), text(w)) for rank, (w, row) in enumerate(rows)
        ]
        return StepTimes(SPAN, (newest + 1) * SPAN, tuple(ranks))
