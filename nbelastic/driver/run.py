"""One run of a job's program: what each worker gave back and printed, and the future that users wait for."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.errors import JobError, JobStoppedError, UsageError
from nbelastic.driver.results import Outcome
from nbelastic.kinds import PATH, check_kind
from nbelastic.terminal import newest, shown

EVERY, KEEP = 100, 3  # commits between two checkpoints, and how many stay
TAIL = 1000  # lines of output kept in memory a worker; the log files have all of it
MOST = 100_000  # of all workers together, those that have died included; the one that was quiet for longest goes first
ERRORS = 100  # that are kept of workers whose programs failed

Checkpoints = tuple[str, int, int] | None  # the folder, commits between two, how many are kept


def checkpoints(folder: str | os.PathLike[str] | None, every: int | None, keep: int | None) -> Checkpoints:
    """A job's checkpoints as the workers are told of them. UsageError if they cannot be as asked for."""
    if folder is None:
        if every is not None or keep is not None:
            given = "checkpoint_keep" if every is None else "checkpoint_every"
            raise UsageError(f"{given} says nothing without checkpoint: name a folder too.")
        return None
    check_kind("checkpoint", folder, PATH)
    for name, number in (("checkpoint_every", every), ("checkpoint_keep", keep)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UsageError(f"{name}={number!r}: a whole number, at least 1.")
    path = os.path.abspath(os.path.expanduser(folder)) if os.fspath(folder) else ""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise UsageError(f"checkpoint={os.fspath(folder)!r} is no folder.")
    return path, EVERY if every is None else every, KEEP if keep is None else keep


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

    def __init__(self, forget: Callable[[m.WorkerId], object] = lambda _: None) -> None:
        self._forget = forget
        self.lines: OrderedDict[m.WorkerId, deque[Line]] = OrderedDict()  # of each; the newest writer last
        self.heard = 0  # lines so far
        self.changes = 0  # of lines without an end
        self._kept = 0  # lines in memory
        self._rests: dict[tuple[m.WorkerId, str], tuple[int, Line]] = {}  # of each stream: the change, and the line

    def add(self, worker: m.WorkerId, line: Line) -> None:
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

    def _of(self, worker: m.WorkerId) -> deque[Line]:
        lines = self.lines.setdefault(worker, deque(maxlen=TAIL))
        self.lines.move_to_end(worker)
        return lines

    def begin(self, worker: m.WorkerId, rest: Line) -> None:
        """A line that has no end yet; without text: there is none any more."""
        self._of(worker)
        self.changes += 1
        self._rests[worker, rest.stream] = self.changes, rest

    def begun(self, worker: m.WorkerId, stream: str) -> str:
        """The line of this stream that has no end yet."""
        return self._rests[worker, stream][1].text if (worker, stream) in self._rests else ""

    def unfinished(self, worker: str | None = None) -> list[tuple[m.WorkerId, Line]]:
        """The lines without an end, of one worker or of all: the present state of progress bars, the last words of a job."""
        found = [(w, rest) for (w, _), (_, rest) in sorted(self._rests.items(), key=lambda item: item[0])]
        rests = ((w, rest._replace(text=shown(rest.text))) for w, rest in found)
        return [(w, line) for w, line in rests if line.text and worker in (None, str(w))]

    def changed_since(self, change: int) -> list[tuple[m.WorkerId, Line]]:
        """The lines without an end that have changed after `change`, those that are empty now included."""
        return [(w, rest) for (w, _), (number, rest) in self._rests.items() if number > change]

    def since(self, number: int, worker: str | None = None, most: int = TAIL) -> list[tuple[m.WorkerId, Line]]:
        """The newest `most` lines after `number`, of one worker or of all, in the order in which they were heard."""
        found = [
            (w, line)
            for w, lines in list(self.lines.items())
            if (worker is None or str(w) == worker) and lines and lines[-1].number > number
            for line in list(lines)
            if line.number > number
        ]
        return sorted(found, key=lambda pair: pair[1].number)[-most:]


class Run:
    """Lives in the driver's thread.

    `program` is what workers run; None for a script, and if an earlier driver's is lost. The future has the packed value of
    each rank, None for one that died after others had finished.
    """

    def __init__(self, name: str, program: wire.Program | None) -> None:
        self.name = name
        self.program = program
        self._plan = program.checkpoints if program is not None else None
        self.outcomes: dict[m.WorkerId, Outcome] = {}
        self.future: Future[list[wire.Blob | None]] = Future()
        self.printed = Printed(self._forget)
        self.members: tuple[m.WorkerId, ...] = ()
        self._end: m.EndJob | None = None
        self._heard_to: dict[tuple[m.WorkerId, str], int] = {}  # which position of each stream

    def hear(self, output: wire.WorkerOutput) -> None:
        """Keep the last lines of what a worker printed."""
        w, stream, printed = output.worker, output.stream, self.printed
        known, begin = self._heard_to.get((w, stream), 0), output.end - len(output.text)
        if output.end <= known:
            return
        self._heard_to[w, stream] = output.end
        if begin > known:
            self._add(output, f"… {begin - known} characters are only in the log file …")
        before = printed.begun(w, stream)
        *whole, rest = (before + output.text[max(0, known - begin) :]).split("\n")
        for text in whole:
            self._add(output, shown(text))
        rest = newest(rest)[-10_000:]
        if rest != before:
            printed.begin(w, Line(0, stream, rest, output.rank))

    def _forget(self, worker: m.WorkerId) -> None:
        for stream in ("out", "err"):
            self._heard_to.pop((worker, stream), None)

    def _add(self, output: wire.WorkerOutput, text: str) -> None:
        line = Line(self.printed.heard + 1, output.stream, text, output.rank)
        self.printed.add(output.worker, line)

    def ended(self, worker: m.WorkerId, outcome: Outcome) -> None:
        """Keep what became of the program on this worker, as far as it is still needed."""
        if not self.future.done():
            self.outcomes[worker] = outcome
            failed = [w for w, each in self.outcomes.items() if each.error]
            for w in failed[:-ERRORS]:
                del self.outcomes[w]
        self.settle(False)

    def end(self, command: m.EndJob) -> None:
        self._end = command
        self.members = command.members
        self.forget_program()
        self.settle(False)

    def forget_program(self) -> None:
        """No worker begins it any more."""
        if self.program is not None and self.program.call is not None and self.program.call.path:
            with contextlib.suppress(OSError):
                Path(self.program.call.path).unlink()
        self.program = None

    def settle(self, late: bool) -> None:
        """Resolve the future as soon as all is known; `late`: with what is known now."""
        end = self._end
        if end is None or self.future.done():
            return
        if end.outcome == "succeeded":
            self.future.set_result([self.outcomes.get(w, Outcome()).value for w in end.members])
            self.outcomes.clear()
            return
        if end.outcome == "stopped":
            self.future.set_exception(JobStoppedError(f"{self.name} was stopped: {end.reason}"))
            return
        culprit = end.culprit
        if culprit is not None and culprit not in self.outcomes and not late:
            return
        remote = self.outcomes[culprit].traceback if culprit in self.outcomes else ""
        rank = end.members.index(culprit) if culprit in end.members else None
        worker = str(culprit) if culprit else ""
        text = f"{self.name} failed: {end.reason}{self._where_to_go_on()}"
        self.future.set_exception(JobError(text, rank=rank, worker=worker, remote_traceback=remote))

    def _where_to_go_on(self) -> str:
        if self._plan is None:
            return ""
        return f"; run it again with checkpoint={self._plan[0]!r} to go on from its newest checkpoint"

    def abandon(self, reason: str) -> None:
        """The cluster is gone: nobody shall wait for ever."""
        self.settle(True)
        if not self.future.done():
            self.future.set_exception(JobStoppedError(f"{self.name} was stopped: {reason}"))
