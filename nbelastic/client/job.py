"""The class `Job`: one run of a function, a cell or a script on the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from html import escape
from typing import Any, TextIO

from nbelastic.client.connection import Connection
from nbelastic.client.job_copy import JobCopy
from nbelastic.client.notebook_line import NotebookLine, show_in_one_line
from nbelastic.client.progress import ProgressLine, changing_line, describe_progress, terminal
from nbelastic.client.pushed_values import read_state
from nbelastic.client.waiting import ANSWER_TIMEOUT, wait_for_result
from nbelastic.errors import ClusterStoppedError, DriverLostError, JobError, JobStoppedError, UsageError
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.requests import PullState, StopJob
from nbelastic.system import pickling
from nbelastic.system.argument_types import check_tail, check_timeout


class Job:
    """A running or ended job. `result()`, or `await`, returns one value per rank of the last world, by rank.

    A wait at a terminal, or in a notebook without the dashboard, shows the job's progress.
    """

    def __init__(
        self, driver: Callable[[], Connection], copy: JobCopy, has_view: Callable[[], bool] = lambda: False
    ) -> None:
        """`driver()` returns the connection to the present driver; `has_view()`: a dashboard shows the job already."""
        self._connection, self._copy, self._has_view = driver, copy, has_view
        self._wakers: set[Callable[[], None]] = set()  # one for each coroutine that awaits the end
        self._values: list[Any] | None = None  # unpickled on first use
        copy.future.add_done_callback(lambda _: self._wake_all())

    @property
    def _driver(self) -> Connection:
        return self._connection()

    @property
    def name(self) -> str:
        return self._copy.name

    @property
    def status(self) -> str:
        """running, succeeded, failed, stopped; or detached: this process no longer receives its updates."""
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
        with ProgressLine(self._describe_progress, self._progress_line()) as progress:
            try:
                packed = wait_for_result(self._copy.future, timeout, self._describe_wait, lambda: self._show(progress))
            except KeyboardInterrupt as error:
                show_in_one_line(error)
                raise
        return self._unpack(packed)

    def _unpack(self, packed: list[pickling.Bytes | None]) -> list[Any]:
        """Unpickle the values, once: the driver has only bytes."""
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

    def state_dict(self, name: str | None = None, timeout: float | None = None) -> Any:
        """The training state by name: the `state_dict()` of models, optimizers and so on, and plain values, on the CPU.

        With `name` this value alone: `model.load_state_dict(job.state_dict("model"))`. Of a running job: rank 0 copies it at
        the next commit. After the end: as the elastic function left it or, if it failed, the last commit; until the next
        job begins. UsageError if no worker holds it any more, or if it is sharded. WaitTimeoutError after `timeout` seconds.
        """
        check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            answer = self._driver.request(PullState(self.name, name or ""))
            remaining = None if end is None else max(0.0, end - time.monotonic())
            try:
                return read_state(
                    wait_for_result(answer, remaining, lambda: f"the next commit: {self._driver.status.reason}")
                )
            except DriverLostError:  # the next driver is asked
                continue
            except ClusterStoppedError as error:
                text = f"{error} The training state of {self.name} was on its workers: only a checkpoint has it now."
                raise ClusterStoppedError(text) from None
            finally:
                answer.cancel()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """Return or raise what `result()` does; other tasks, and a notebook's widgets, go on meanwhile.

        A cancellation or a timeout ends the wait, not the job.
        """
        return self._await_end().__await__()

    async def _await_end(self) -> list[Any]:
        """Do what `asyncio.wrap_future` cannot: it would cancel the job's future too, and outlive the event loop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(ended.set)

        self._wakers.add(wake)
        try:
            with ProgressLine(self._describe_progress, self._progress_line()) as progress:
                while not self.done():
                    self._refuse_in_child()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(progress.interval):
                            await ended.wait()
                    if not self.done():
                        progress.show()
        finally:
            self._wakers.discard(wake)
        return self._unpack(self._copy.future.result())

    def _wake_all(self) -> None:
        """Run in the reader's thread of the connection."""
        for wake in list(self._wakers):
            wake()

    def _show(self, progress: ProgressLine) -> None:
        self._refuse_in_child()
        progress.show()

    def _refuse_in_child(self) -> None:
        """ClusterStoppedError in a forked child, which receives no updates: the wait would never end."""
        if self._driver.forked:
            raise ClusterStoppedError(f"{self.name} cannot be waited for here: {self._driver.end_reason}.")

    def _describe_wait(self) -> str:
        return f"{self.name}: {self._driver.status.reason}"

    def _progress_line(self) -> TextIO | NotebookLine | None:
        """Where a wait shows the progress, if anywhere."""
        return terminal() if self._has_view() else changing_line()

    def _describe_progress(self) -> str:
        status = self._driver.status
        return describe_progress(status) if status.job == self.name else f"{self.name} submitted"

    def exception(self, timeout: float | None = None) -> JobError | None:
        """The error that `result()` would raise, or None."""
        try:
            self.result(timeout)
        except JobError as error:
            return error
        return None

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, in whichever way."""
        self.exception(timeout)
        return self

    def stop(self, by: str = "you") -> None:
        """Stop the job; `result()` will raise JobStoppedError. A job that has ended stays as it is."""
        while not self.done():
            answer = self._driver.request(StopJob(by, self.name))
            with contextlib.suppress(DriverLostError):  # the next driver is asked
                wait_for_result(answer, ANSWER_TIMEOUT, lambda: f"the driver: {self._driver.status.reason}")
                return

    def logs(self, rank: int | None = None, worker: str | None = None, tail: int = 100) -> str:
        """The last `tail` lines that the program printed: of one rank, one worker, or all, each line with its worker.

        A progress bar is shown in its newest state. A line without an end comes last. UsageError: an unknown rank or
        worker, both of them, or a `tail` that is negative or not a whole number.
        """
        check_tail(tail)
        return "\n".join(self._lines(rank, worker, tail))

    def lines_since(self, number: int, worker: str | None = None, most: int = 1000) -> list[tuple[str, Line]]:
        """The lines after line `number`, each with its worker: at most the newest `most`, in order of arrival."""
        return [(str(w), line) for w, line in self._copy.output.since(number, worker, most)]

    def unfinished_lines(self, worker: str | None = None) -> list[tuple[str, Line]]:
        """The lines without an end, such as progress bars: the newest state of each worker's two streams."""
        return [(str(w), line) for w, line in self._copy.output.unfinished_lines(worker)]

    @property
    def writers(self) -> list[tuple[str, int | None]]:
        """The workers that have printed something, and their ranks in the present or last world."""
        ranks = {w: rank for rank, w in enumerate(self._members)}
        writers = sorted(self._copy.output.lines, key=lambda w: (ranks.get(w, len(ranks)), w))
        return [(str(w), ranks.get(w)) for w in writers]

    @property
    def _members(self) -> list[WorkerId]:
        """The members of the present or last world, by rank."""
        ranked = sorted((row.rank, row.id) for row in self._driver.status.workers if row.rank is not None)
        return list(self._copy.members) or [WorkerId.parse(worker) for _, worker in ranked]

    def _lines(self, rank: int | None, worker: str | None, tail: int) -> Iterator[str]:
        if rank is not None and worker is not None:
            raise UsageError("give logs() a rank or a worker, and not both.")
        if rank is not None:
            members = self._members
            if not 0 <= rank < len(members):
                raise UsageError(f"there is no rank {rank}: the world has {len(members)}.")
            worker = str(members[rank])
        elif worker not in {
            None,
            *map(str, list(self._copy.output.lines)),
            *(row.id for row in self._driver.status.workers),
        }:
            raise UsageError(
                f"there is no worker {worker!r}, and none of that name has printed anything in {self.name}."
            )
        is_single = worker is not None
        output = self._copy.output
        for w in sorted(output.lines):
            if is_single and str(w) != worker:
                continue
            lines = output.newest(w)
            for line in lines[max(0, len(lines) - tail) :]:
                yield line.text if is_single else f"{w} | {line.text}"

    def _repr_html_(self) -> str:
        """For a notebook, where the text stays after the job's end: of a running job it says what is true then too.

        It has no numbers, as stored outputs are compared when a notebook is tested.
        """
        name = f"<strong>{escape(self.name)}</strong>"
        head = f"<div>{name}: {self.status}</div>"
        error = self._copy.future.exception() if self.done() else None
        if isinstance(error, JobError):
            return head + error._repr_html_()
        if error is not None or self.done():
            return f"{head}<div>{escape(str(error))}</div>" if error else head
        waits, logs, stops = (f"<code>%elastic_{name}</code>" for name in ("wait", "logs", "stop --job"))
        return f"<div>{name} has begun.</div><div>{waits} waits for its end, {logs} prints its output, {stops} stops it.</div>"

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.status}>"
