"""Prints what comes, until it ends: the output of a job, or all that happens to a cluster."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nbelastic.driver.cluster import Cluster
from nbelastic.driver.job import Job
from nbelastic.driver.run import MOST, Line
from nbelastic.notebook.snapshot import StatusView, headline

LOOK = 1.0  # seconds between two looks if nothing seems to change
TAIL = 100  # lines of output that are shown first
EVENTS = 10  # events of the past that are shown first


class Output:
    """Prints each line of a job once, in the order in which they came: of one rank, or of all; at first the last `tail`."""

    def __init__(self, rank: int | None = None, tail: int = TAIL) -> None:
        self._rank, self._tail = rank, tail
        self._job: Job | None = None
        self._number = 0  # of the last line that was looked at

    def show(self, job: Job) -> None:
        """What is new. Of a job that has not been shown before, the last lines."""
        if self._job is None or job.name != self._job.name:
            self._job, self._number = job, 0
        lines = [line for _, line in job.lines_since(self._number, most=MOST)]
        wanted = [line for line in lines if self._wants(line)]
        for line in wanted if self._number else wanted[max(0, len(wanted) - self._tail) :]:
            _print(line)
        self._number = max(1, lines[-1].number) if lines else max(1, self._number)

    def finish(self, job: Job) -> None:
        """The lines that have no end, such as progress bars: what they say last."""
        self.show(job)
        for _, line in job.unfinished_lines():
            if self._wants(line):
                _print(line)

    def _wants(self, line: Line) -> bool:
        return self._rank in (None, line.rank)


def follow_job(cluster: Cluster, output: Output) -> None:
    """Until the job has ended; without a job, wait for one."""
    with _changes(cluster) as changed:
        while (job := cluster.job) is None:
            if cluster.status().phase == "finished":
                return
            _wait(changed)
        while not job.done():
            output.show(job)
            _wait(changed)
        output.finish(job)
        print(f"{job.name} {job.status}", file=sys.stderr)


def follow_all(cluster: Cluster) -> None:
    """Events and output, until the cluster has stopped."""
    output, job = Output(), cluster.job
    _, shown = cluster.numbered_events()
    shown = max(0, shown - EVENTS)
    print(StatusView(cluster.status()), end="\n\n")
    with _changes(cluster) as changed:
        while True:
            over = cluster.status().phase == "finished"
            events, count = cluster.numbered_events()
            for event in events[max(0, len(events) - (count - shown)) :]:
                print(time.strftime("%H:%M:%S", time.localtime(event.time)), event.text)
            shown = count
            last, job = job, cluster.job
            if last is not None and (over or job is None or job.name != last.name):
                output.finish(last)
            if job is not None:
                output.show(job)
            if over:
                print(headline(cluster.status()))
                return
            _wait(changed)


def _print(line: Line) -> None:
    who = "" if line.rank is None else f"rank {line.rank} | "
    print(f"{who}{line.text}", flush=True)


@contextmanager
def _changes(cluster: Cluster) -> Iterator[threading.Event]:
    """An event that is set when something has changed."""
    changed = threading.Event()
    end = cluster.subscribe(lambda _: changed.set())
    try:
        yield changed
    finally:
        end()


def _wait(changed: threading.Event) -> None:
    sys.stdout.flush()
    changed.wait(LOOK)
    changed.clear()
