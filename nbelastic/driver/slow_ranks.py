"""Names the rank for which the others wait in each step, while all train on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import OwnTime

SLOW = 1.5  # times the median of the others
LEAST = 5.0  # milliseconds beyond that median,
SHARE = 0.2  # and this part of a step
LASTS = 10.0  # seconds for which a rank must be slow
FRESH = 20.0  # seconds for which a report counts
MOST_OTHERS = 64  # members with which a rank is compared: their median says enough, however large the world


class SlowRanks:
    """Of one job. All times are the driver's."""

    def __init__(self) -> None:
        self._generation = 0
        self._reports: dict[WorkerId, tuple[OwnTime, float]] = {}
        self._since: dict[WorkerId, float] = {}  # since when each rank is slow
        self._texts: dict[WorkerId, str] = {}  # of ranks that were named

    def add(self, worker: WorkerId, members: Sequence[WorkerId], own: OwnTime, now: float) -> str:
        """A member has reported. Returns a text when it is to be named: once until it is fast again."""
        if own.generation != self._generation:
            self._generation, self._reports, self._since, self._texts = own.generation, {}, {}, {}
        self._reports[worker] = own, now
        others = [w for w in members[: MOST_OTHERS + 1] if w != worker][:MOST_OTHERS]
        times = [self._reports[w][0].own for w in others if self._is_fresh(w, now)]
        if len(times) < len(others) or not times:
            return ""
        usual = median(times)
        if own.own < max(SLOW * usual, usual + LEAST, usual + SHARE * own.step):
            self.forget(worker)
            return ""
        since = self._since.setdefault(worker, now)
        if now - since < LASTS:
            return ""
        was_named = worker in self._texts
        where = f", mostly in {own.place}" if own.place else ""
        times_slower = f"{own.own / usual:.1f} times as slow as the others" if usual >= 1 else "slower than the others"
        self._texts[worker] = f"is {times_slower} ({own.own:.0f} ms per step, they {usual:.0f} ms){where}"
        return "" if was_named else self._texts[worker]

    def since(self, worker: WorkerId) -> float:
        """When a rank that was named became slow."""
        return self._since[worker]

    def text(self, worker: WorkerId) -> str:
        """The text of a rank that was named and is still slow, else an empty one."""
        return self._texts.get(worker, "")

    def forget(self, worker: WorkerId) -> None:
        """It is fast again, or is lost."""
        self._since.pop(worker, None)
        self._texts.pop(worker, None)

    def _is_fresh(self, worker: WorkerId, now: float) -> bool:
        return worker in self._reports and now - self._reports[worker][1] <= FRESH
