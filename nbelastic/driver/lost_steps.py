"""Counts the steps that a loss undoes: commits that were reported, and that the next world has to make again."""

from __future__ import annotations


class LostSteps:
    """Lives in the driver's thread. A driver that has just come knows no number before the first report of a commit."""

    def __init__(self) -> None:
        self._newest: int | None = None  # the newest commit of the present generation that was reported
        self._is_broken = False  # the generation broke, and the next one is not formed yet
        self._lost: int | None = 0  # since the last first commit of a generation
        self._has_lost = False
        self._begun_at = 0  # the commit that the root held when the generation was formed

    def begin_job(self) -> None:
        """A job begins, without a commit."""
        self._newest, self._is_broken = 0, False
        self.take()

    def note_commit(self, commit: int) -> None:
        """A worker has reported this commit of the present generation.

        If nothing is known when it breaks, a later report is that of a survivor, and does not show what was lost.
        """
        if self._newest is not None or not self._is_broken:
            self._newest = max(commit, self._newest or 0)

    def note_break(self) -> None:
        """The present generation is broken."""
        self._is_broken = self._has_lost = True

    def note_formation(self, commit: int) -> None:
        """A generation is formed whose root holds this commit."""
        if self._is_broken:
            known = self._lost is not None and self._newest is not None
            self._lost = (self._lost or 0) + max(0, (self._newest or 0) - commit) if known else None
            self._newest = commit
        self._is_broken, self._begun_at = False, commit

    def take(self, continued: int | None = None) -> int | None:
        """The generation has made its first commit: the steps lost before it; None without a loss, or if it is not known.

        `continued`: the commit from which a sharded state continues. It may be older than what the root reported.
        """
        lost, had_loss = self._lost, self._has_lost
        self._lost, self._has_lost = 0, False
        if not had_loss or lost is None:
            return None
        return lost + max(0, self._begun_at - continued) if continued is not None else lost
