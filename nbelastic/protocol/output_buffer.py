"""The last lines that the workers of a job have printed, in the driver and in each client."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from nbelastic.protocol.ids import WorkerId
from nbelastic.system.terminal_text import shown

TAIL = 1000  # lines of output kept in memory a worker; the log files have all of it
MOST = 100_000  # of all workers together, those that have died included; the one that was quiet for longest goes first


class Line(NamedTuple):
    """A line that a worker printed to `stream` (out or err) as `rank`. Lines are numbered in each run, over all workers.

    A line that has no end yet, such as a progress bar, has number 0.
    """

    number: int
    stream: str
    text: str
    rank: int | None = None


class Printed:
    """What the workers of a job have printed: the last lines of each. One thread writes, any may read.

    `forget(worker)` is called when others need the room of its lines.
    """

    def __init__(self, forget: Callable[[WorkerId], object] = lambda _: None) -> None:
        self._forget = forget
        self.lines: OrderedDict[WorkerId, deque[Line]] = OrderedDict()  # of each; the newest writer last
        self.heard = 0  # lines so far
        self.changes = 0  # of lines without an end
        self._kept = 0  # lines in memory
        self._rests: dict[tuple[WorkerId, str], tuple[int, Line]] = {}  # of each stream: the change, and the line

    def add(self, worker: WorkerId, line: Line) -> None:
        """The next line, in the order in which they were heard."""
        lines = self._of(worker)
        self.heard = line.number
        self._kept += len(lines) < TAIL
        lines.append(line)
        while self._kept > MOST and len(self.lines) > 1:
            worker, lines = self.lines.popitem(last=False)
            self._kept -= len(lines)
            for stream in ("out", "err"):
                self._rests.pop((worker, stream), None)
            self._forget(worker)

    def _of(self, worker: WorkerId) -> deque[Line]:
        lines = self.lines.setdefault(worker, deque(maxlen=TAIL))
        self.lines.move_to_end(worker)
        return lines

    def begin(self, worker: WorkerId, rest: Line) -> None:
        """A line that has no end yet; without text: there is none any more."""
        self._of(worker)
        self.changes += 1
        self._rests[worker, rest.stream] = self.changes, rest

    def begun(self, worker: WorkerId, stream: str) -> str:
        """The line of this stream that has no end yet."""
        return self._rests[worker, stream][1].text if (worker, stream) in self._rests else ""

    def unfinished(self, worker: str | None = None) -> list[tuple[WorkerId, Line]]:
        """The lines without an end, of one worker or of all: the present state of progress bars, the last words of a job."""
        found = [(w, rest) for (w, _), (_, rest) in sorted(self._rests.items(), key=lambda item: item[0])]
        rests = ((w, rest._replace(text=shown(rest.text))) for w, rest in found)
        return [(w, line) for w, line in rests if line.text and worker in (None, str(w))]

    def changed_since(self, change: int) -> list[tuple[WorkerId, Line]]:
        """The lines without an end that have changed after `change`, those that are empty now included."""
        return [(w, rest) for (w, _), (number, rest) in self._rests.items() if number > change]

    def since(self, number: int, worker: str | None = None, most: int = TAIL) -> list[tuple[WorkerId, Line]]:
        """The newest `most` lines after `number`, of one worker or of all, in the order in which they were heard."""
        found = [
            (w, line)
            for w, lines in list(self.lines.items())
            if (worker is None or str(w) == worker) and lines and lines[-1].number > number
            for line in list(lines)
            if line.number > number
        ]
        return sorted(found, key=lambda pair: pair[1].number)[-most:]
