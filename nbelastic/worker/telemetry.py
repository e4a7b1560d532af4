"""What the program reports with `state.report`, and when that is sent."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from nbelastic.protocol.rank_reports import OwnTime, ReplicaHashes
from nbelastic.protocol.worker_messages import Checkpoint, Copies

REPORT_PERIOD = 0.25  # seconds between two reports of rank 0
SLOW_REPORT_PERIOD = 1.0  # the same of the other ranks, of which a client sees only the commit
MAX_REPORT_PERIOD = 5.0  # the same in the largest worlds
MAX_REPORT_RATE = 4000.0  # reports per second that a driver gets of one world, up to `MAX_REPORT_PERIOD`


def report_period(world_size: int, *, is_rank_0: bool) -> float:
    """Seconds between two reports of a rank. In a world of more than 4,000 they are rarer: each one costs the driver time."""
    rarely = min(MAX_REPORT_PERIOD, max(SLOW_REPORT_PERIOD, world_size / MAX_REPORT_RATE))
    return REPORT_PERIOD if is_rank_0 else rarely


class Due(Struct, frozen=True):
    """What to send now. `first`: milliseconds to the generation's first commit, sent once."""

    values: dict[str, float | None]  # None: the value is not finite
    first: float | None
    is_urgent: bool
    copies: Copies | None = None
    checkpoint: Checkpoint | None = None
    replica: ReplicaHashes | None = None
    own: OwnTime | None = None


class Telemetry:
    """The main thread puts values, the link thread sends them."""

    def __init__(self) -> None:
        self.copies: Callable[[float], Copies] | None = None  # what to report about copies of commits, at a time
        self.checkpoint: Callable[[float], Checkpoint | None] = lambda _: None  # the same about the job's checkpoints
        self.replica: Callable[[], ReplicaHashes | None] = lambda: None  # the newest hashes of commits
        self.own: Callable[[float, int, int], OwnTime | None] = lambda *_: None  # at a time, generation and commit
        self._values: dict[str, float] = {}
        self._not_finite: dict[str, None] = {}  # names with such a value since the last report
        self._diverged: frozenset[str] = frozenset()  # names with such a value in the last report
        self._first: tuple[float, Copies | None] | None = None
        self._sent: tuple[int, int] = (0, 0)
        self._sent_copies: tuple[int | None, int] | None = None  # the whole commit, and bytes
        self._next = 0.0

    def put(self, values: dict[str, float]) -> bool:
        """Replace the values. Returns whether to send at once: a value is not finite, and the last report did not say so."""
        self._values = values
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        self._not_finite.update(dict.fromkeys(wrong))
        return not self._diverged.issuperset(wrong)

    def begin(self, first: float, now: float) -> None:
        """The generation's first commit came `first` milliseconds after the group was formed. The rank may leave it at once."""
        self._first = (first, self._copies_at(now))

    def _copies_at(self, now: float) -> Copies | None:
        source = self.copies  # the main thread may remove it at this moment
        return source(now) if source is not None else None

    def due(self, now: float, generation: int, commits: int, *, world_size: int, is_rank_0: bool) -> Due | None:
        """What to send at `now` (seconds), if anything."""
        begun = self._first
        if begun is not None:  # do not clear a value that the main thread sets at this moment
            self._first = None
        values = self._values
        wrong = frozenset(self._not_finite.copy()).union(n for n, value in values.items() if not math.isfinite(value))
        is_urgent = not wrong <= self._diverged
        first, copies = begun if begun is not None else (None, self._copies_at(now))
        known = (copies.whole, copies.nbytes) if copies is not None else None
        is_old = (generation, commits) == self._sent and known == self._sent_copies
        if first is None and not is_urgent and (is_old or now < self._next):
            return None
        for name in wrong:
            self._not_finite.pop(name, None)
        period = report_period(world_size, is_rank_0=is_rank_0)
        self._sent, self._sent_copies, self._next, self._diverged = (generation, commits), known, now + period, wrong
        checkpoint = self.checkpoint(now) if is_rank_0 else None
        return Due(
            {**values, **dict.fromkeys(wrong)},
            first,
            is_urgent,
            copies,
            checkpoint,
            self.replica(),
            self.own(now, generation, commits),
        )
