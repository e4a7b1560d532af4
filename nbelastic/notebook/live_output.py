"""Folds equal output of several workers into one, while a cell runs. It reads no clock and shows nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FOLD_TIME = 0.5  # seconds that a line waits for the same line of the other workers


class Shown(NamedTuple):
    """One line of a stream ("out" or "err"), or one "display", of all `workers` that have it."""

    workers: list[str]
    kind: str
    text: str


class _Item(NamedTuple):
    kind: str
    text: str
    at: float


class LiveOutput:
    """The output of a cell on these workers. Each worker's lines keep their order."""

    def __init__(self, workers: Sequence[str] = ()) -> None:
        self._waiting: dict[str, deque[_Item]] = {worker: deque() for worker in workers}
        self._unfinished: dict[tuple[str, str], str] = {}  # by worker and stream

    @property
    def workers(self) -> list[str]:
        """All workers that the cell runs on, as far as known."""
        return list(self._waiting)

    def add(self, worker: str, kind: str, text: str, now: float = 0.0) -> None:
        """Take text of a stream, which may end in the middle of a line, or a display."""
        waiting = self._waiting.setdefault(worker, deque())
        if kind == "display":
            self._finish_lines(worker, now)
            waiting.append(_Item(kind, text, now))
            return
        *lines, rest = (self._unfinished.pop((worker, kind), "") + text).split("\n")
        waiting.extend(_Item(kind, line, now) for line in lines)
        if rest:
            self._unfinished[worker, kind] = rest

    def take(self, now: float) -> Iterator[Shown]:
        """Yield what all workers have, and what has waited long enough for the others."""
        while (shown := self._next(now - FOLD_TIME)) is not None:
            yield shown

    def take_rest(self) -> Iterator[Shown]:
        """The cell has ended: yield all that is left, unfinished lines too."""
        for worker in self._waiting:
            self._finish_lines(worker, 0.0)
        while (shown := self._next(float("inf"))) is not None:
            yield shown

    def _finish_lines(self, worker: str, now: float) -> None:
        for kind in ("out", "err"):
            rest = self._unfinished.pop((worker, kind), "")
            if rest:
                self._waiting[worker].append(_Item(kind, rest, now))

    def _next(self, before: float) -> Shown | None:
        """The next line of the first worker that has one which may be shown. Lines older than `before` wait no longer."""
        for waiting in self._waiting.values():
            if not waiting:
                continue
            kind, text, at = waiting[0]
            same = [w for w, other in self._waiting.items() if other and other[0][:2] == (kind, text)]
            if len(same) == len(self._waiting) or at <= before:
                for worker in same:
                    self._waiting[worker].popleft()
                return Shown(same, kind, text)
        return None
