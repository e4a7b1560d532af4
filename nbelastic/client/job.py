"""What people hold of a running program."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.client.progress import Progress, terminal
from nbelastic.client.progress import line as in_one_line
from nbelastic.errors import (
    ClusterStoppedError,
    DriverLostError,
    JobError,
    JobStoppedError,
    UsageError,
    WaitTimeoutError,
)
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.requests import StopJob
from nbelastic.system import pickling

if TYPE_CHECKING:
    from nbelastic.client.connection import Connection, JobCopy

T = TypeVar("T")
ANSWER = 60.0  # seconds that the driver may take to answer what it can answer at once
_SLICE = 0.1  # seconds between looks at Ctrl-C while waiting


def outcome(
    future: Future[T], timeout: float | None, what: Callable[[], str], meanwhile: Callable[[], object] = lambda: None
) -> T:
    """The future's result, waited for in slices, so that Ctrl-C is heard; after each `meanwhile` is called.

    Its own error, whichever that is, or WaitTimeoutError, which says `what` was waited for.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
        futures.wait([future], max(0.0, left))
        if future.done():
            return future.result()
        if end is not None and time.monotonic() >= end:
            raise WaitTimeoutError(f"{timeout:g} s were not enough for {what()}")
        meanwhile()


class Job:
    """A running (or ended) program. `result()`, or `await`, gives one value per rank of the last world, by rank.

    Who waits at a terminal sees meanwhile how it gets on.
    """

    def __init__(self, driver: Callable[[], Connection], copy: JobCopy) -> None:
        """`driver()`: the connection to the driver that there is now."""
        self._connection, self._copy = driver, copy
        self._bells: set[Callable[[], None]] = set()  # of those who await the end
        self._values: list[Any] | None = None  # once somebody has asked for them
        copy.future.add_done_callback(lambda _: self._ring())

    @property
    def _driver(self) -> Connection:
        return self._connection()

    @property
    def name(self) -> str:
        return self._copy.name

    @property
    def status(self) -> str:
        """running, succeeded, failed, stopped; or detached: nothing is heard of it here any more."""
        future = self._copy.future
        if not future.done():
            return "running"
        error = future.exception()
        if error is None:
            return "succeeded"
        if isinstance(error, ClusterStoppedError):
            return "detached"
        return "stopped" if isinstance(error, JobStoppedError) else "failed"

    def done(self) -> bool:
        return self._copy.future.done()

    def result(self, timeout: float | None = None) -> list[Any]:
        """One value per rank of the last world, by rank (None for a rank that died after others had finished).

        JobError with the first failing rank's remote traceback, or if a value cannot be unpickled here; JobStoppedError, or
        WaitTimeoutError with the reason.
        """
        with Progress(self._line, terminal()) as progress:
            packed = outcome(self._copy.future, timeout, self._why, progress.show)
        return self._unpack(packed)

    def _unpack(self, packed: list[pickling.Bytes | None]) -> list[Any]:
        """Unpickle the values, once. What the driver has are bytes."""
        if self._values is None:
            values = []
            for rank, data in enumerate(packed):
                try:
                    values.append(None if data is None else pickling.unpack(data))
                except Exception as error:
                    text = f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
                    raise JobError(f"{self.name} succeeded, but {text}", rank=rank) from error
            self._values = values
        return self._values

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """What `result()` gives or raises; other tasks, and a notebook's widgets, go on meanwhile.

        Cancelling it, or a timeout, ends the waiting and not the job.
        """
        return self._ended().__await__()

    async def _ended(self) -> list[Any]:
        """`asyncio.wrap_future` would hand a cancellation on to the run's future, and outlive the event loop."""
        loop, bell = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed at this very moment
                loop.call_soon_threadsafe(bell.set)

        self._bells.add(ring)
        try:
            with Progress(self._line, terminal()) as progress:
                while not self.done():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(progress.interval):
                            await bell.wait()
                    if not self.done():
                        progress.show()
        finally:
            self._bells.discard(ring)
        return self._unpack(self._copy.future.result())

    def _ring(self) -> None:
        """In the thread of the connection."""
        for ring in list(self._bells):
            ring()

    def _why(self) -> str:
        return f"{self.name}: {self._driver.status.reason}"

    def _line(self) -> str:
        status = self._driver.status
        return in_one_line(status) if status.job == self.name else f"{self.name} submitted"

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
        while not self.done():
            answered = self._driver.request(StopJob(by, self.name))
            with contextlib.suppress(DriverLostError):  # then the next one is asked
                outcome(answered, ANSWER, lambda: f"the driver: {self._driver.status.reason}")
                return

    def logs(self, rank: int | None = None, worker: str | None = None, tail: int = 100) -> str:
        """The last `tail` lines that the program printed: of one rank, one worker, or all, each line with its worker.

        A progress bar is shown in its newest state. A line that has no end yet comes last.
        """
        return "\n".join(self._lines(rank, worker, tail))

    def lines_since(self, number: int, worker: str | None = None, most: int = 1000) -> list[tuple[str, Line]]:
        """The lines after line `number`, each with its worker: at most the newest `most`, in the order of their arrival."""
        return [(str(w), line) for w, line in self._copy.printed.since(number, worker, most)]

    def unfinished_lines(self, worker: str | None = None) -> list[tuple[str, Line]]:
        """The lines that have no end yet, such as progress bars: the newest state of each worker's two streams."""
        return [(str(w), line) for w, line in self._copy.printed.unfinished(worker)]

    @property
    def writers(self) -> list[tuple[str, int | None]]:
        """The workers that have printed something, and their ranks in the present or last world."""
        ranks = {w: rank for rank, w in enumerate(self._members)}
        writers = sorted(self._copy.printed.lines, key=lambda w: (ranks.get(w, len(ranks)), w))
        return [(str(w), ranks.get(w)) for w in writers]

    @property
    def _members(self) -> list[WorkerId]:
        """Of the present or last world, by rank."""
        ranked = sorted((row.rank, row.id) for row in self._driver.status.workers if row.rank is not None)
        return list(self._copy.members) or [WorkerId.parse(worker) for _, worker in ranked]

    def _lines(self, rank: int | None, worker: str | None, tail: int) -> Iterator[str]:
        if rank is not None:
            members = self._members
            if not 0 <= rank < len(members):
                raise UsageError(f"there is no rank {rank}: the world has {len(members)}.")
            worker = str(members[rank])
        one = worker is not None
        for w, lines in sorted(self._copy.printed.lines.items(), key=lambda item: item[0]):
            if one and str(w) != worker:
                continue
            for line in [*list(lines), *(line for _, line in self._copy.printed.unfinished(str(w)))][-tail:]:
                yield line.text if one else f"{w} | {line.text}"

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.status}>"
