"""One run of a job: what each worker returned and printed, and the future that users wait for."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from pathlib import Path

from nbelastic.core import commands as cmd
from nbelastic.driver.results import Outcome
from nbelastic.errors import JobError, JobStoppedError
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Line, OutputBuffer
from nbelastic.system.terminal_text import as_displayed, drop_replaced_frames

KEPT_ERRORS = 100  # of workers whose programs failed
LONGEST_UNFINISHED_LINE = 10_000  # characters


class JobRun:
    """Lives in the driver's thread.

    `program` is what workers run; None for a script, and if the program of an earlier driver is lost. The future's result is
    the pickled value of each rank, None for a rank that was lost after others had finished.
    """

    def __init__(self, name: str, program: worker_messages.Program | None) -> None:
        self.name = name
        self.program = program
        self._replaced: worker_messages.Program | None = None  # by `program`: workers may still fetch it to start it
        self.checkpoints = program.checkpoints if program is not None else None
        self.outcomes: dict[WorkerId, Outcome] = {}
        self.future: Future[list[messages.Blob | None]] = Future()
        self.output = OutputBuffer(self._forget_output)
        self.members: tuple[WorkerId, ...] = ()
        self._end: cmd.EndJob | None = None
        self._received_to: dict[tuple[WorkerId, str], int] = {}  # position in each worker's stream

    def add_output(self, output: messages.WorkerOutput) -> None:
        """Keep the last lines of what a worker printed."""
        w, stream, printed = output.worker, output.stream, self.output
        known, begin = self._received_to.get((w, stream), 0), output.end - len(output.text)
        if output.end <= known:
            return
        self._received_to[w, stream] = output.end
        if begin > known:
            self._add_line(output, f"… {begin - known} characters are only in the log file …")
        before = printed.unfinished_line(w, stream)
        *complete, unfinished = (before + output.text[max(0, known - begin) :]).split("\n")
        for text in complete:
            self._add_line(output, as_displayed(text))
        unfinished = drop_replaced_frames(unfinished)[-LONGEST_UNFINISHED_LINE:]
        if unfinished != before or (complete and unfinished):
            printed.set_unfinished(w, Line(0, stream, unfinished, output.rank, output.at))

    def _forget_output(self, worker: WorkerId) -> None:
        for stream in ("out", "err"):
            self._received_to.pop((worker, stream), None)

    def _add_line(self, output: messages.WorkerOutput, text: str) -> None:
        line = Line(self.output.line_count + 1, output.stream, text, output.rank, output.at)
        self.output.add(output.worker, line)

    def add_outcome(self, worker: WorkerId, outcome: Outcome) -> None:
        """Keep how the program ended on this worker, as long as it is needed."""
        if not self.future.done():
            self.outcomes[worker] = outcome
            failed = [w for w, each in self.outcomes.items() if each.error]
            for w in failed[:-KEPT_ERRORS]:
                del self.outcomes[w]
        self.resolve()

    def end(self, command: cmd.EndJob) -> None:
        """The job has an outcome. The future is resolved now, or when the culprit's error has arrived."""
        self._end = command
        self.members = command.members
        self.forget_program()
        self.resolve()

    def forget_program(self) -> None:
        """Drop the program and its file: no worker starts it any more."""
        for program in (self.program, self._replaced):
            if program is not None:
                remove_file(program)
        self.program = self._replaced = None

    def replace_program(self, program: worker_messages.Program) -> None:
        """From now on workers start this program. One that is starting runs the one before, and then this one inside it."""
        if self._replaced is not None:
            remove_file(self._replaced)
        self.program, self._replaced = program, self.program

    def numbered(self, number: int) -> worker_messages.Program | None:
        """The program of this number: the present one, or the one before."""
        found = (one for one in (self.program, self._replaced) if one is not None and one.number == number)
        return next(found, None)

    def resolve(self, *, force: bool = False) -> None:
        """Resolve the future if the job has ended and the culprit's error is known; with `force` also without it."""
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
        if culprit is not None and culprit not in self.outcomes and not force:
            return
        remote = self.outcomes[culprit].traceback if culprit in self.outcomes else ""
        rank = end.members.index(culprit) if culprit in end.members else None
        worker = str(culprit) if culprit else ""
        hint = self._checkpoint_hint()
        text = f"{self.name} failed: {end.reason.removesuffix('.') if hint else end.reason}{hint}"
        self.future.set_exception(JobError(text, rank=rank, worker=worker, remote_traceback=remote))

    def _checkpoint_hint(self) -> str:
        if self.checkpoints is None:
            return ""
        return f"; run it again with checkpoint={self.checkpoints[0]!r} to go on from its newest checkpoint"

    def abandon(self, reason: str) -> None:
        """Resolve the future in any case, because the cluster has stopped."""
        self.resolve(force=True)
        if not self.future.done():
            self.future.set_exception(JobStoppedError(f"{self.name} was stopped: {reason}"))


def remove_file(program: worker_messages.Program) -> None:
    """Remove the file of a program's call, if it has one."""
    if program.call is not None and program.call.path:
        with contextlib.suppress(OSError):
            Path(program.call.path).unlink()
