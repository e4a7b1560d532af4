"""What people hold of a running program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.core import messages as m
from nbelastic.core.errors import JobError, JobStoppedError, UsageError, WaitTimeoutError
from nbelastic.driver.run import Run

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver

T = TypeVar("T")
_SLICE = 0.1  # seconds between looks at Ctrl-C while waiting


def outcome(future: Future[T], timeout: float | None, what: Callable[[], str]) -> T:
    """The future's result, waited for in slices, so that Ctrl-C is heard. WaitTimeoutError says `what` was waited for."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
        try:
            return future.result(max(0.0, left))
        except FutureTimeoutError:
            if not future.done() and end is not None and time.monotonic() >= end:
                raise WaitTimeoutError(f"{timeout:g} s were not enough for {what()}") from None


class Job:
    """A running (or ended) program. `result()` gives one value per rank of the last world, by rank."""

    def __init__(self, driver: Driver, run: Run) -> None:
        self._driver, self._run = driver, run

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def status(self) -> str:
        """running, succeeded, failed or stopped."""
        future = self._run.future
        if not future.done():
            return "running"
        error = future.exception()
        if error is None:
            return "succeeded"
        return "stopped" if isinstance(error, JobStoppedError) else "failed"

    def done(self) -> bool:
        return self._run.future.done()

    def result(self, timeout: float | None = None) -> list[Any]:
        """One value per rank of the last world, by rank (None for a rank that died after others had finished).

        JobError with the first failing rank's remote traceback, JobStoppedError, or WaitTimeoutError with the reason.
        """
        return outcome(self._run.future, timeout, lambda: f"{self.name}: {self._driver.status.reason}")

    def exception(self, timeout: float | None = None) -> JobError | None:
        """The error that `result()` would raise, or None."""
        try:
            self.result(timeout)
        except JobError as error:
            return error
        return None

    def wait(self, timeout: float | None = None) -> Job:
        """Wait for its end, however it ends."""
        self.exception(timeout)
        return self

    def stop(self, by: str = "you") -> None:
        """End it; `result()` will raise JobStoppedError. Ended already: nothing happens."""
        if not self.done():
            self._driver.post(m.JobStopRequested(self.name, f"stopped by {by}"))

    def logs(self, rank: int | None = None, worker: str | None = None, tail: int = 100) -> str:
        """The last `tail` lines that the program printed: of one rank, one worker, or all, each line with its worker."""
        return "\n".join(self._lines(rank, worker, tail))

    def _lines(self, rank: int | None, worker: str | None, tail: int) -> Iterator[str]:
        members = self._run.members or self._driver.world.members
        if rank is not None:
            if not 0 <= rank < len(members):
                raise UsageError(f"there is no rank {rank}: the world has {len(members)}.")
            worker = str(members[rank])
        one = worker is not None
        for w, lines in sorted(self._run.lines.items(), key=lambda item: item[0]):
            if one and str(w) != worker:
                continue
            for _, line in list(lines)[-tail:]:
                yield line if one else f"{w} | {line}"

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.status}>"
