"""Notices a training that waits for its copies, and says what to do. Pure: times are arguments."""

from __future__ import annotations

import math

from nbelastic.sharded.replication import Whole

SHARE = 0.1  # of the time between two copied commits: a longer wait is too long
NOTABLE = 0.01  # seconds: shorter waits, of very small models, are not worth a line
IN_A_ROW = 3  # waits; a single one may come from a busy network


class CopyWaits:
    """Of one job. `every`: commits from one that is copied to the next."""

    def __init__(self, every: int) -> None:
        self._every, self._in_a_row, self._has_warned = every, 0, False

    def note(self, commit: int, whole: Whole | None, begun: float, ended: float) -> str | None:
        """`commit` waited from `begun` to `ended` (monotonic seconds) until the one before it, `whole`, was whole.

        Returns a line for the job's log once, when several commits in a row have waited too long.
        """
        if whole is None or whole.is_first:
            return None
        waited, between = ended - begun, ended - whole.made_at
        self._in_a_row = self._in_a_row + 1 if waited > max(SHARE * between, NOTABLE) else 0
        if self._has_warned or self._in_a_row < IN_A_ROW:
            return None
        self._has_warned = True
        enough = math.ceil(self._every * whole.seconds / max(begun - whole.made_at, 0.001))
        return (
            f"commit {commit} waited {waited:.2f} s for the copies of commit {whole.commit.number}, "
            f"{waited / between:.0%} of the time since it. Copying takes {whole.seconds:.2f} s and every={self._every}: "
            f"use ShardedState(every={max(enough, self._every + 1)}) or more, so that the training does not wait."
        )
