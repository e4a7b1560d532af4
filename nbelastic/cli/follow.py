"""Prints the output of a job until it ends, or the events and output of a cluster until it stops."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from nbelastic.client.cluster import Cluster
from nbelastic.client.job import Job
from nbelastic.errors import ClusterStoppedError, UsageError
from nbelastic.notebook.status_text import StatusView, headline
from nbelastic.protocol.output_buffer import MOST, Line
from nbelastic.system.argument_types import check_tail
from nbelastic.system.terminal_text import remove_controls

CHECK_INTERVAL = 1.0  # seconds between two checks if no change is reported
TAIL = 100  # lines of earlier output that are printed first
EARLIER_EVENTS = 10  # earlier events that are printed first


class Output:
    """Prints each line of a job once, in order of arrival: of one rank or of all, beginning with the last `tail` lines."""

    def __init__(self, rank: int | None = None, tail: int = TAIL, *, timestamps: bool = False) -> None:
        """`timestamps`: begin each line with its time, as `docker logs` and `kubectl logs` do."""
        check_tail(tail)
        if rank is not None and rank < 0:
            raise UsageError(f"rank={rank}: ranks begin at 0.")
        self._rank, self._tail, self._timestamps = rank, tail, timestamps
        self._job_name = ""
        self._has_begun = False  # the first lines of this job were printed, if there were any
        self._has_printed = False  # the job, whether or not its lines are among the last ones
        self._last_number = 0  # of the last line that was read

    def show(self, job: Job) -> None:
        """Print new lines. Print only the last lines of a job that was not shown before."""
        if job.name != self._job_name:
            self._job_name, self._has_begun, self._has_printed, self._last_number = job.name, False, False, 0
        lines = [line for _, line in job.lines_since(self._last_number, most=MOST)]
        wanted = [line for line in lines if self._wants(line)]
        if self._has_begun and lines and (missing := lines[-1].number - self._last_number - len(lines)) > 0:
            print(f"… {missing} lines {'' if self._rank is None else 'of all ranks '}are only in the log files …")
        for line in wanted if self._has_begun else wanted[max(0, len(wanted) - self._tail) :]:
            self._print(line)
        self._has_begun, self._has_printed = True, self._has_printed or bool(wanted)
        self._last_number = lines[-1].number if lines else self._last_number

    def finish(self, job: Job) -> None:
        """Print the remaining lines, and those without an end, such as progress bars, in their last state."""
        self.show(job)
        for _, line in job.unfinished_lines():
            if self._wants(line):
                self._print(line)
        if self._rank is not None and not self._has_printed:
            print(f"rank {self._rank} of {job.name} has printed nothing", file=sys.stderr)

    def _wants(self, line: Line) -> bool:
        return self._rank in (None, line.rank)

    def _print(self, line: Line) -> None:
        self._has_printed = True
        stamp = f"{_timestamp(line.time)} " if self._timestamps else ""
        label = "" if line.rank is None else f"rank {line.rank} | "
        print(f"{stamp}{label}{remove_controls(line.text)}", flush=True)


def follow_job(cluster: Cluster, output: Output) -> None:
    """Print the output until the job has ended; without a job, wait for one. Raise the job's error if it fails."""
    with _changes(cluster) as changed:
        while (job := cluster.job) is None:
            if cluster.status().phase == "finished":
                raise ClusterStoppedError(f"{cluster.status().reason}.")
            _wait(changed)
        while not job.done():
            output.show(job)
            _wait(changed)
        output.finish(job)
        error = job._copy.future.exception()  # `job.exception()` would unpickle the values
        if error is not None:
            raise error
        print(f"{job.name} succeeded", file=sys.stderr)


def follow_all(cluster: Cluster) -> None:
    """Print events and output until the cluster has stopped. ClusterStoppedError if its driver is lost."""
    output, job = Output(), cluster.job
    _, shown = cluster.numbered_events()
    shown = max(0, shown - EARLIER_EVENTS)
    print(f"{cluster.name} is {remove_controls(str(StatusView.of(cluster)))}", end="\n\n")
    with _changes(cluster) as changed:
        while True:
            is_over = cluster.status().phase == "finished"
            events, count = cluster.numbered_events()
            for event in events[max(0, len(events) - (count - shown)) :]:
                print(
                    time.strftime("%H:%M:%S", time.localtime(event.time)),
                    remove_controls(event.text).replace("\n", " "),
                )
            shown = count
            last, job = job, cluster.job
            if last is not None and (is_over or job is None or job.name != last.name):
                output.finish(last)
            if job is not None:
                output.show(job)
            if is_over:
                if cluster.died:
                    raise ClusterStoppedError(f"{cluster.status().reason}.")
                print(remove_controls(headline(cluster.status())))
                return
            _wait(changed)


def _timestamp(seconds: float) -> str:
    """The time in UTC as RFC 3339 writes it, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def _changes(cluster: Cluster) -> Iterator[threading.Event]:
    """Yield an event that is set when something has changed."""
    changed = threading.Event()
    end = cluster.subscribe(lambda _: changed.set())
    try:
        yield changed
    finally:
        end()


def _wait(changed: threading.Event) -> None:
    sys.stdout.flush()
    changed.wait(CHECK_INTERVAL)
    changed.clear()
