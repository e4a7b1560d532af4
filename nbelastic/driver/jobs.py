"""The runs of jobs: the present one, and the last one that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.arrivals import Arrivals
from nbelastic.driver.pending import Pending
from nbelastic.driver.results import Outcome
from nbelastic.driver.run import Run
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot import SavedJob
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId

LATE = 5.0  # seconds within which the results are there of a job that had ended when the driver took over
LAST_WORDS = 2.0  # seconds after a job's stop time-out within which its workers say why it failed


class Jobs:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox; `forget_values(job)` removes the values of a job's ranks when no
    client needs them any more. `submitted`: how many jobs the cluster has had.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        fleet: Fleet,
        scripts: Scripts,
        pending: Pending,
        notes: SnapshotWriter,
        post: Callable[[ev.Event], None],
        forget_values: Callable[[str], None],
        submitted: int,
    ) -> None:
        self._cluster, self._fleet, self._scripts, self._pending, self._notes = cluster, fleet, scripts, pending, notes
        self._post, self._forget_values = post, forget_values
        self._loop = asyncio.get_running_loop()
        self.submitted = submitted
        self.runs: dict[str, Run] = {}

    @property
    def present(self) -> str:
        """The name of the job whose end is not known yet, a script or not; empty if there is none."""
        return next((name for name, run in self.runs.items() if not run.future.done()), "")

    def submit(self, run: Run, saved: SavedJob) -> None:
        """Take in a new job or script. OSError, and no job, if it cannot be saved."""
        self._notes.submit(saved)
        self.submitted += 1
        self._add(run)
        self._fleet.begin_job(run.name, self._cluster().numbered)
        if saved.script is None:
            self._post(ev.JobSubmitted(run.name))
        else:
            self._scripts.begin(run, *saved.script)

    def _add(self, run: Run) -> None:
        """Keep a run, and of those that have ended the last: the last words of its workers may still come."""
        for name in [name for name, other in self.runs.items() if other.future.done()][:-1]:
            del self.runs[name]
            self._forget_values(name)
        self.runs[run.name] = run
        self._pending.track(run.future)

    def take(
        self,
        message: worker_messages.ProgramResult
        | worker_messages.ResultPiece
        | worker_messages.FetchCall
        | messages.WorkerOutput,
    ) -> None:
        """A worker speaks of a program that it is to run, or has run."""
        match message:
            case worker_messages.ProgramResult(worker=w, job=job):
                self._fleet.results.take(message, partial(self._program_ended, w, job))
            case worker_messages.ResultPiece():
                self._fleet.results.piece(message)
            case worker_messages.FetchCall(job=job):
                if job in self.runs:
                    self._fleet.send_call(message, self.runs[job])
            case messages.WorkerOutput(job=job):
                if job in self.runs:  # the last words of one may come when the next has begun
                    self.runs[job].hear(message)
                self._notes.output(message)

    def _program_ended(self, w: WorkerId, job: str, outcome: Outcome) -> None:
        """A worker's program has ended, and its value is here."""
        self._post(ev.ProgramEnded(w, job, outcome.error))
        if job in self.runs:
            self.runs[job].ended(w, outcome)

    def run_program(self, w: WorkerId, job: str) -> None:
        """Have a worker run the job's program."""
        self._fleet.live.steps.pop(w, None)
        self._fleet.run_program(w, self.runs[job], self._program_ended)

    def end(self, command: cmd.EndJob) -> None:
        """The job has an outcome. Its future is resolved when its workers have said their last words, or after a while."""
        run = self.runs[command.job]
        run.end(command)
        if not run.future.done():
            self._loop.call_later(self._cluster().limits.timeouts.stop + LAST_WORDS, run.settle, True)

    # ---- the newest job of the driver before this one ----

    def recall(self, job: SavedJob | None) -> None:
        """Before any worker is heard: they will tell how it ended. Values of other jobs are removed."""
        if job is not None:
            self._add(Run(job.name, job.program))
        self._fleet.results.remove_all_but(list(self.runs))
        self._notes.recall(self.runs, self._fleet.live)

    def go_on(self, saved: SavedJob | None, arrivals: Arrivals) -> None:
        """The driver has taken over: the job goes on, begins if the last driver was killed before that, or has ended."""
        if saved is not None and saved.script is not None:
            self._go_on_with_script(saved, arrivals)
            return
        cluster = self._cluster()
        job = cluster.job
        if saved is not None and (job is None or job.name != saved.name):
            self._post(ev.JobSubmitted(saved.name))
        elif job is not None and job.outcome and job.name in self.runs:
            workers = [w for w, here in arrivals.workers.items() if here.job == job.name and w in cluster.workers]
            self._end_again(self.runs[job.name], workers, cmd.EndJob(job.name, job.outcome, job.reason, job.ranks))

    def _go_on_with_script(self, job: SavedJob, arrivals: Arrivals) -> None:
        """It has ended, while a driver was there or well without one; or it begins again."""
        agents = arrivals.agents
        codes = [agents[host].ended.get(node) if host in agents else None for host, node in job.nodes.items()]
        if job.over is None and codes and all(code == 0 for code in codes):
            over = cmd.EndJob(job.name, "succeeded", "every worker ended well, while no driver was there", ())
            job = replace(job, over=over)
            self._notes.job_goes_on(over=over)
        if job.over is not None:
            self.runs[job.name].end(job.over)
        else:
            self._scripts.begin_again(self.runs[job.name], job, {host: agent.nodes for host, agent in agents.items()})

    def _end_again(self, run: Run, workers: Sequence[WorkerId], over: cmd.EndJob) -> None:
        """The job was over when the last driver ended: its workers tell this one as well how their programs ended."""

        def told(cluster: ClusterState) -> bool | None:
            return True if all(w in run.outcomes or w not in cluster.workers for w in workers) else None

        def give_up() -> None:
            if self._fleet.results.coming(workers):
                self._loop.call_later(LATE, give_up)
            else:
                run.end(over)

        all_told: Future[bool] = Future()
        all_told.add_done_callback(lambda _: run.end(over))
        self._pending.resolve(all_told, told)
        self._loop.call_later(LATE, give_up)
