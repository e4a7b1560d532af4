"""Folds equal output of several workers into one, while a cell runs. It reads no clock and shows nothing itself."""

from __future__ import annotations

from collections import Counter, deque
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
        self._counts: Counter[tuple[str, str]] = Counter()  # how often each line waits
        self._unfinished: dict[tuple[str, str], str] = {}  # by worker and stream

    @property
    def workers(self) -> list[str]:
        """All workers that the cell runs on, as far as known."""
        return list(self._waiting)

    def add(self, worker: str, kind: str, text: str, now: float = 0.0) -> None:
        """Take text of a stream, which may end in the middle of a line, or a display."""
        self._waiting.setdefault(worker, deque())
        if kind == "display":
            self._finish_lines(worker, now)
            self._append(worker, _Item(kind, text, now))
            return
        *lines, rest = (self._unfinished.pop((worker, kind), "") + text).split("\n")
        for line in lines:
            self._append(worker, _Item(kind, line, now))
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
                self._append(worker, _Item(kind, rest, now))

    def _append(self, worker: str, item: _Item) -> None:
        self._waiting.setdefault(worker, deque()).append(item)
        self._counts[item[:2]] += 1

    def _next(self, before: float) -> Shown | None:
        """The next line that may be shown: all workers have it next, or it is older than `before`.

        Of several, the first one that no other worker has further down: its turn comes later, and then it is folded.
        """
        heads: dict[tuple[str, str], list[str]] = {}
        for worker, waiting in self._waiting.items():
            if waiting:
                heads.setdefault(waiting[0][:2], []).append(worker)
        due = [
            head
            for head, workers in heads.items()
            if len(workers) == len(self._waiting) or any(self._waiting[worker][0].at <= before for worker in workers)
        ]
        if not due:
            return None
        kind, text = chosen = next((head for head in due if self._counts[head] == len(heads[head])), due[0])
        for worker in heads[chosen]:
            self._waiting[worker].popleft()
        self._counts[chosen] -= len(heads[chosen])
        return Shown(heads[chosen], kind, text)
