"""The driver's clock: it excludes the time during which the driver itself did not run."""

from __future__ import annotations

import time
from collections.abc import Callable

from nbelastic.transport.backlog import Unread

MAX_EXCUSED = 30.0  # seconds; after an absence, silence is ignored for at most this long, while the network comes back
MAX_HELD = 30.0  # seconds; deadlines wait for at most this long while messages wait unread


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """Counts the seconds in which the driver could act. Deadlines of `step` use this clock, so an absence uses up none of them.

    The driver's thread calls `now()` at least every `max_gap` seconds. A longer gap between two calls is an absence: the
    process was stopped. A suspend of the machine is an absence too, although the monotonic clock stops meanwhile.
    """

    def __init__(
        self, max_gap: float, monotonic: Callable[[], float] = time.monotonic, boottime: Callable[[], float] = _boottime
    ) -> None:
        self._max_gap, self._monotonic, self._boottime = max_gap, monotonic, boottime
        self._seen = monotonic()
        self._suspended = boottime() - self._seen
        self.skipped = 0.0  # seconds by which this clock is behind the monotonic one
        self.absent = 0.0  # seconds of all absences so far, including suspends
        self._excused = self._seen  # silence before this (monotonic) time is ignored
        self._held_until: float | None = None  # (monotonic) while messages wait unread
        self._held = 0.0  # seconds for which this clock was held
        self._ran_since = -MAX_HELD + self._seen  # (monotonic) the end of the last hold

    @property
    def is_held(self) -> bool:
        """Whether this clock stands still, as messages wait unread."""
        until = self._held_until
        return until is not None and self._seen < until

    def hold(self, *, hold: bool) -> None:
        """Stand still while messages wait unread: what a deadline waits for may be among them.

        For at most `MAX_HELD` seconds, until `hold=False`, and for no longer than it has run since the last hold: a driver
        that is late again and again goes on with its deadlines too.
        """
        self.now()
        if hold and self._held_until is None:
            self._held_until = self._seen + min(MAX_HELD, self._seen - self._ran_since)
        elif not hold and self._held_until is not None:
            self._ran_since = min(self._seen, self._held_until)
            self._held_until = None

    def now(self) -> float:
        """The time. This call detects absences, so only the driver's thread may make it."""
        seen = self._monotonic()
        suspended = self._boottime() - seen
        gap, asleep, was_held = seen - self._seen, suspended - self._suspended, self.is_held
        self._seen, self._suspended = seen, suspended
        if was_held or gap > self._max_gap:
            self.skipped += gap
            self._held += gap if gap <= self._max_gap else 0.0
        absence = sum(seconds for seconds in (gap, asleep) if seconds > self._max_gap)
        if absence:
            self.absent += absence
            self._excused = seen + min(absence, MAX_EXCUSED)
        return seen - self.skipped

    def awake(self) -> float:
        """The time without absences only: what is measured, such as the time since a commit, goes on while deadlines wait."""
        return self.now() + self._held

    def machine_time(self, at: float) -> float:
        """The machine's monotonic time at a time `at` since the last absence. A time of day is made from it."""
        return at + self.skipped

    def silence(self, heard_at: float, unread: Unread) -> float:
        """Seconds since the last message of a peer, which arrived at `heard_at` (monotonic).

        The time since messages wait unread does not count, as one of this peer may be among them. Nor does the time of an
        absence, and the same time after it, up to `MAX_EXCUSED` seconds.
        """
        self.now()
        return max(0.0, unread.read_up_to(self._seen) - max(heard_at, self._excused))

    def unread_seconds(self, unread: Unread) -> float:
        """For how long messages may have waited unread, at most. What `silence` excuses does not count."""
        self.now()
        return max(0.0, self._seen - max(unread.read_up_to(self._seen), self._excused))

    def read(self) -> float:
        """The time, from any thread."""
        return (self._seen if self.is_held else self._monotonic()) - self.skipped
