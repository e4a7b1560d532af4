"""What a client knows about a job: its printed lines, its last members, and its results or error."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from nbelastic import errors
from nbelastic.errors import JobError, NbelasticError
from nbelastic.protocol import client_messages as u
from nbelastic.protocol import messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import OutputBuffer
from nbelastic.system import pickling
from nbelastic.system.future_results import resolve_if_pending


class JobCopy:
    """The client's copy of a job, kept up to date by the driver.

    `future` resolves to the packed value of each rank; None for a rank that died after others had finished.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.output = OutputBuffer()
        self._uncounted_lines = 0  # lines that only an earlier driver has counted
        self.members: tuple[WorkerId, ...] = ()  # of the last world, once it has ended
        self.future: Future[list[pickling.Bytes | None]] = Future()

    def apply(self, update: u.JobUpdate, *, is_complete: bool) -> None:
        """Take in an update. `is_complete`: it has all lines that this driver knows; an earlier one may have sent some of them."""
        printed = self.output
        if is_complete:
            printed, self._uncounted_lines = OutputBuffer(), self._count_missing_lines(update)
        for worker, line in update.lines:
            printed.add(worker, line._replace(number=line.number + self._uncounted_lines))
        for worker, rest in update.unfinished:
            printed.set_unfinished(worker, rest)
        self.output = printed
        self.members = update.members or self.members
        if update.end is not None and not self.future.done():
            self._end(update.end)

    def _count_missing_lines(self, update: u.JobUpdate) -> int:
        """Count the known lines that the new driver does not count, so that line numbers never decrease."""
        known = self.output.line_count
        if not update.lines:
            return known
        newest = next(((w, line) for w, line in self.output.since(known - 1, most=1)), None)
        if newest is not None:
            worker, last = newest
            for w, line in reversed(update.lines):
                if w == worker and line[1:] == last[1:]:
                    return max(0, known - line.number)
        return max(0, known - update.lines[-1][1].number)

    def _end(self, end: u.JobEnd) -> None:
        try:
            if end.values is not None:
                self.future.set_result([_read_value(blob) for blob in end.values])
                return
            error = create_error(end.error, end.text)
            if isinstance(error, JobError):
                error.rank, error.worker, error.remote_traceback = end.rank, end.worker, end.traceback
        except (OSError, ValueError) as problem:
            error = JobError(f"{self.name} succeeded, but its results cannot be read: {problem}")
        self.future.set_exception(error)

    def abandon(self, error: NbelasticError) -> None:
        """Fail the job's future: no more updates will arrive."""
        resolve_if_pending(self.future.set_exception, error)


def _read_value(blob: messages.Blob | None) -> pickling.Bytes | None:
    if blob is None:
        return None
    return pickling.mapped(Path(blob.path)) if blob.path else bytearray(blob.data)  # writable, as arrays in it must be


def create_error(name: str, text: str) -> NbelasticError:
    """Create the error that a driver has sent: `name` is its class in `nbelastic.errors`."""
    kind: type[NbelasticError] = getattr(errors, name, NbelasticError)
    return kind(text)
