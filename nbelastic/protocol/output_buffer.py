"""The newest lines that the workers of a job have printed, in the driver and in each client."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from nbelastic.protocol.ids import WorkerId
from nbelastic.system.terminal_text import as_displayed

LONG = 1000  # characters of a line that counts as one in these limits; one of 64,000 counts as 65
TAIL = 10_000  # lines kept per worker, and with many workers fewer; the log files have all lines
LEAST = 1000  # lines kept per worker, however many there are
MOST = 100_000  # lines kept of all workers, lost ones included; beyond it, the worker that printed last longest ago is dropped


class Line(NamedTuple):
    """A line that a worker printed to `stream` ("out" or "err") as `rank`.

    `number`: among all lines of the job, from 1; 0 for an unfinished line, such as a progress bar. `time`: when the driver has
    received it, in seconds since 1970.
    """

    number: int
    stream: str
    text: str
    rank: int | None = None
    time: float = 0.0


class _Unfinished(NamedTuple):
    """The newest unfinished line of a stream. The next line of that stream after line `after` completes it."""

    change: int
    after: int
    line: Line


class OutputBuffer:
    """The newest lines of each worker of a job. One thread writes, any thread may read.

    `on_drop(worker)` is called when a worker's lines are dropped to make room for others.
    """

    def __init__(self, on_drop: Callable[[WorkerId], object] = lambda _: None) -> None:
        self._on_drop = on_drop
        self.lines: OrderedDict[WorkerId, deque[Line]] = OrderedDict()  # by worker; the one that printed last is last
        self.line_count = 0  # all lines so far
        self.changes = 0  # changes of unfinished lines so far
        self._kept = 0  # lines in memory
        self._kept_of: dict[WorkerId, int] = {}  # of each worker
        self._share = TAIL  # of them, the most per worker
        self._unfinished: dict[tuple[WorkerId, str], _Unfinished] = {}  # by stream

    def add(self, worker: WorkerId, line: Line) -> None:
        """Add the next line. Lines must be added by ascending number."""
        lines = self._lines_of(worker)
        self.line_count = line.number
        lines.append(line)
        self._count(worker, _weight(line))
        self._trim(worker)
        while self._kept > MOST and len(self.lines) > 1:
            worker, _ = self.lines.popitem(last=False)
            self._kept -= self._kept_of.pop(worker)
            for stream in ("out", "err"):
                self._unfinished.pop((worker, stream), None)
            self._on_drop(worker)

    def _lines_of(self, worker: WorkerId) -> deque[Line]:
        if worker not in self.lines:
            self.lines[worker], self._kept_of[worker] = deque(), 0
            share = self._share
            self._share = max(LEAST, min(TAIL, MOST // len(self.lines)))
            for other in self.lines if self._share < share else ():  # not for each of a thousand workers
                self._trim(other)
        self.lines.move_to_end(worker)
        return self.lines[worker]

    def _count(self, worker: WorkerId, lines: int) -> None:
        self._kept += lines
        self._kept_of[worker] += lines

    def _trim(self, worker: WorkerId) -> None:
        """Drop the oldest lines of a worker beyond its share, but not its newest one."""
        lines = self.lines[worker]
        while self._kept_of[worker] > self._share and len(lines) > 1:
            self._count(worker, -_weight(lines.popleft()))

    def set_unfinished(self, worker: WorkerId, line: Line) -> None:
        """Set the unfinished line of a stream; a line without text means that there is none."""
        self._lines_of(worker)
        self.changes += 1
        self._unfinished[worker, line.stream] = _Unfinished(self.changes, self.line_count, line)

    def unfinished_line(self, worker: WorkerId, stream: str) -> str:
        """The text of a stream's unfinished line; empty if there is none. For the thread that writes."""
        return self._unfinished[worker, stream].line.text if (worker, stream) in self._unfinished else ""

    def unfinished_lines(self, worker: str | None = None) -> list[tuple[WorkerId, Line]]:
        """The unfinished lines of one worker or of all, as a terminal displays them, such as the state of progress bars."""
        found = {w for (w, _), found in list(self._unfinished.items()) if found.line.text and worker in (None, str(w))}
        return [(w, line) for w in sorted(found) for line in self.newest(w) if not line.number]

    def newest(self, worker: WorkerId) -> list[Line]:
        """The kept lines of a worker, then its unfinished ones as a terminal displays them.

        The thread that writes adds a line before it clears the unfinished line which that line completes. So an unfinished line
        is read before the lines, and left out if they complete it: no line is returned twice.
        """
        unfinished = [self._unfinished.get((worker, stream)) for stream in ("err", "out")]
        lines = list(self.lines.get(worker, ()))
        last = {line.stream: line.number for line in lines}
        rest = [one.line for one in unfinished if one is not None and last.get(one.line.stream, 0) <= one.after]
        displayed = (line._replace(text=as_displayed(line.text)) for line in rest)
        return [*lines, *(line for line in displayed if line.text)]

    def changed_since(self, change: int) -> list[tuple[WorkerId, Line]]:
        """The unfinished lines that have changed after change number `change`, with those that became empty."""
        return [(w, found.line) for (w, _), found in self._unfinished.items() if found.change > change]

    def since(self, number: int, worker: str | None = None, most: int = TAIL) -> list[tuple[WorkerId, Line]]:
        """The newest `most` lines after line `number`, of one worker or of all, by number."""
        found = [
            (w, line)
            for w, lines in list(self.lines.items())
            if (worker is None or str(w) == worker) and lines and lines[-1].number > number
            for line in list(lines)
            if line.number > number
        ]
        return sorted(found, key=lambda pair: pair[1].number)[max(0, len(found) - most) :]


def _weight(line: Line) -> int:
    """As how many lines it counts."""
    return 1 + len(line.text) // LONG
