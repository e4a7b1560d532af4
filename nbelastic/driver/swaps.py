"""New programs for a job that trains: keeps them until the core has accepted or rejected them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core.state import ClusterState
from nbelastic.core.swaps import wanted
from nbelastic.driver.job_run import JobRun, remove_file
from nbelastic.driver.pending import Pending
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.errors import UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.program_events import SwapCancelled, SwapFailed, SwapSubmitted
from nbelastic.protocol.requests import Swap, SwapOutcome


class _NewProgram(Struct):
    run: JobRun
    program: worker_messages.Program
    notes: tuple[str, ...] = ()
    failure: SwapOutcome | None = None
    is_kept: bool = False


class Swaps:
    """Lives in the driver's thread; `post` puts events into its inbox."""

    def __init__(self, pending: Pending, snapshot_writer: SnapshotWriter, post: Callable[[ev.Event], None]) -> None:
        self._pending, self._snapshot_writer, self._post = pending, snapshot_writer, post
        self._number = time.time_ns()  # of the last swap: unique among all drivers of the cluster
        self._new: dict[int, _NewProgram] = {}  # by number, while a client waits for it

    def submit(self, request: Swap, run: JobRun, cluster: ClusterState, outcome: Future[SwapOutcome]) -> None:
        """Replace the program of this run. If `outcome` is cancelled, so is the swap.

        UsageError: another swap is under way or came first, or the training has ended.
        """
        if cluster.halt.swap or (cluster.active is not None and cluster.active.trial):
            raise UsageError("another new program is being tried: wait until it has made its first commit.")
        # Numbers grow. The machine's clock may have been set back since the program of an earlier driver came.
        self._number = number = max(self._number, wanted(cluster)) + 1
        program = replace(request.program, job=run.name, number=number, checkpoints=run.checkpoints)
        new = self._new[number] = _NewProgram(run, program)

        def collect(cluster: ClusterState) -> SwapOutcome | None:
            job = cluster.active
            if job is not None and (number in (cluster.halt.swap, job.trial)):
                return None
            if new.is_kept:
                return SwapOutcome(run.name, new.notes)
            if new.failure is not None:
                return new.failure
            why = "the training has ended" if job is None or job.succeeded else "another new program came first"
            raise UsageError(f"the program of {run.name} was not replaced: {why}.")

        def forget(outcome: Future[SwapOutcome]) -> None:
            if outcome.cancelled():
                self._post(SwapCancelled(number))
            if self._new.pop(number, None) is not None:
                remove_file(program)

        outcome.add_done_callback(forget)
        self._pending.resolve_after(SwapSubmitted(number, request.by), outcome, collect)

    def program(self, number: int) -> worker_messages.Program | None:
        """The new program of this number, if it is on trial."""
        new = self._new.get(number)
        return new.program if new is not None else None

    def receive(self, report: worker_messages.SwapReport, rank: int | None) -> None:
        """Take a worker's report on a new program."""
        new = self._new.get(report.number)
        if report.error:
            if new is not None and new.failure is None:
                new.failure = SwapOutcome(new.run.name, (), report.error, rank, str(report.worker), report.traceback)
            self._post(SwapFailed(report.worker, report.number, report.error))
        elif new is not None:
            new.notes = report.notes

    def reject(self, number: int, why: str) -> None:
        """The core has rejected the program of this number. If a worker has reported an error of it, that says more."""
        new = self._new.get(number)
        if new is not None and new.failure is None:
            new.failure = SwapOutcome(new.run.name, (), why)

    def keep(self, number: int) -> None:
        """The core has accepted the program of this number: newcomers run it, also under the next driver."""
        new = self._new.pop(number, None)
        if new is not None:
            new.is_kept = True
            new.run.replace_program(new.program)
            self._snapshot_writer.update_job(program=new.program)
            self._snapshot_writer.save()
