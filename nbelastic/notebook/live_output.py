"""Folds equal output of several workers into one, while a cell runs. It reads no clock and shows nothing itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nbelastic.system.terminal_text import LINE_STEP, as_displayed, drop_replaced_frames

FOLD_TIME = 0.5  # seconds that a line waits for the same line of the other workers
LIVE_AFTER = 0.2  # seconds after which a line without an end is shown as it is


class Shown(NamedTuple):
    """One line of a stream ("out" or "err"), or one "display", of all `workers` that have it."""

    workers: list[str]
    kind: str
    text: str


class _Item(NamedTuple):
    kind: str
    text: str
    at: float


class _Unfinished(NamedTuple):
    """The lines of a stream from its cursor on: one, or more if the cursor was moved up, as nested progress bars do."""

    lines: list[str]
    since: float


class LiveOutput:
    """The output of a cell on these workers. Each worker's lines keep their order."""

    def __init__(self, workers: Sequence[str] = ()) -> None:
        self._waiting: dict[str, deque[_Item]] = {worker: deque() for worker in workers}
        self._counts: Counter[tuple[str, str]] = Counter()  # how often each line waits
        self._unfinished: dict[tuple[str, str], _Unfinished] = {}  # by worker and stream

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
        begun, since = self._unfinished.pop((worker, kind), ([""], now))
        finished, rest = _write(begun, text)
        for line in finished:
            self._append(worker, _Item(kind, line, now))
        if any(rest):
            self._unfinished[worker, kind] = _Unfinished(rest, now if finished else since)

    def take(self, now: float) -> Iterator[Shown]:
        """Yield what all workers have, and what has waited long enough for the others."""
        while (shown := self._next(now - FOLD_TIME)) is not None:
            yield shown

    def live(self, now: float) -> list[tuple[list[str], str]]:
        """The present state of each line without an end, such as a progress bar, with all workers that have it."""
        rows: dict[str, list[str]] = {}
        for worker in self._waiting:
            for kind in ("out", "err"):
                lines, since = self._unfinished.get((worker, kind), ([], now))
                for text in filter(None, map(as_displayed, lines)) if since <= now - LIVE_AFTER else ():
                    rows.setdefault(text, []).append(worker)
        return [(workers, text) for text, workers in rows.items()]

    def take_rest(self) -> Iterator[Shown]:
        """The cell has ended: yield all that is left, unfinished lines too."""
        for worker in self._waiting:
            self._finish_lines(worker, 0.0)
        while (shown := self._next(float("inf"))) is not None:
            yield shown

    def _finish_lines(self, worker: str, now: float) -> None:
        for kind in ("out", "err"):
            lines, _ = self._unfinished.pop((worker, kind), ([], now))
            for line in filter(as_displayed, lines):
                self._append(worker, _Item(kind, line, now))

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
        if not self._counts[chosen]:
            del self._counts[chosen]  # a cell may print millions of different lines
        return Shown(heads[chosen], kind, text)


def _write(lines: list[str], text: str) -> tuple[list[str], list[str]]:
    """Write the text from the first of these lines on. Returns the lines before the cursor, and those from there on."""
    lines, at = list(lines), 0
    for part in LINE_STEP.split(text):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif LINE_STEP.fullmatch(part):
            at = max(0, at - int(part[2:-1] or 1))
        else:
            lines[at] = drop_replaced_frames(lines[at] + part)
    return lines[:at], lines[at:]
