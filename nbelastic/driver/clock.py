"""The driver's clock: it stands still while the driver itself did not run."""

from __future__ import annotations

import time
from collections.abc import Callable

EXCUSED = 30.0  # the most seconds after an absence for which silence means nothing: a network may have to come back


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """Seconds in which the driver could act. Deadlines of `step` are of this clock, so an absence of the driver uses up none.

    The driver's thread calls `now()` at least every `most` seconds. A longer gap between two calls is an absence: its
    process was stopped. A suspended machine is one too, although its monotonic clock stands still.
    """

    def __init__(
        self, most: float, monotonic: Callable[[], float] = time.monotonic, boottime: Callable[[], float] = _boottime
    ) -> None:
        self._most, self._monotonic, self._boottime = most, monotonic, boottime
        self._seen = monotonic()
        self._suspended = boottime() - self._seen
        self.skipped = 0.0  # seconds by which this clock is behind the monotonic one
        self.absent = 0.0  # seconds of all absences so far, as other machines count them
        self._excused = self._seen  # silence before this (monotonic) time means nothing

    def now(self) -> float:
        """The time. Notices an absence, so only the driver's thread may call it."""
        seen = self._monotonic()
        suspended = self._boottime() - seen
        gap, asleep = seen - self._seen, suspended - self._suspended
        self._seen, self._suspended = seen, suspended
        if gap > self._most:
            self.skipped += gap
        absence = sum(seconds for seconds in (gap, asleep) if seconds > self._most)
        if absence:
            self.absent += absence
            self._excused = seen + min(absence, EXCUSED)
        return seen - self.skipped

    def silence(self, heard_at: float) -> float:
        """Seconds for which a peer has been silent that was heard last at `heard_at` (monotonic).

        Time in which the driver was absent does not count, nor as much time after it, up to `EXCUSED`.
        """
        self.now()
        return max(0.0, self._seen - max(heard_at, self._excused))

    def read(self) -> float:
        """The time, from any thread."""
        return self._monotonic() - self.skipped
