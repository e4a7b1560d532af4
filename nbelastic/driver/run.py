"""One run of a job's program: what each worker gave back and printed, and the future that users wait for."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from pathlib import Path

from nbelastic.core import commands as cmd
from nbelastic.driver.results import Outcome
from nbelastic.errors import JobError, JobStoppedError
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Line, Printed
from nbelastic.system.terminal_text import newest, shown

ERRORS = 100  # that are kept of workers whose programs failed


class Run:
    """Lives in the driver's thread.

    `program` is what workers run; None for a script, and if an earlier driver's is lost. The future has the packed value of
    each rank, None for one that died after others had finished.
    """

    def __init__(self, name: str, program: worker_messages.Program | None) -> None:
        self.name = name
        self.program = program
        self._plan = program.checkpoints if program is not None else None
        self.outcomes: dict[WorkerId, Outcome] = {}
        self.future: Future[list[messages.Blob | None]] = Future()
        self.printed = Printed(self._forget)
        self.members: tuple[WorkerId, ...] = ()
        self._end: cmd.EndJob | None = None
        self._heard_to: dict[tuple[WorkerId, str], int] = {}  # which position of each stream

    def hear(self, output: messages.WorkerOutput) -> None:
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

    def _forget(self, worker: WorkerId) -> None:
        for stream in ("out", "err"):
            self._heard_to.pop((worker, stream), None)

    def _add(self, output: messages.WorkerOutput, text: str) -> None:
        line = Line(self.printed.heard + 1, output.stream, text, output.rank)
        self.printed.add(output.worker, line)

    def ended(self, worker: WorkerId, outcome: Outcome) -> None:
        """Keep what became of the program on this worker, as far as it is still needed."""
        if not self.future.done():
            self.outcomes[worker] = outcome
            failed = [w for w, each in self.outcomes.items() if each.error]
            for w in failed[:-ERRORS]:
                del self.outcomes[w]
        self.settle(False)

    def end(self, command: cmd.EndJob) -> None:
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
