"""The runs of jobs: the present one, and the last one that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.pending import Pending
from nbelastic.driver.results import Outcome, Results
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.swaps import Swaps
from nbelastic.driver.takeover import TakeoverReports
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.program_events import SwapFailed
from nbelastic.protocol.settings import Settings
from nbelastic.system import pickling
from nbelastic.system.private_files import make_private

RESULTS_TIMEOUT = 5.0  # seconds until the results of a job must be there that had ended before the takeover
ERROR_TIMEOUT = 2.0  # seconds after a job's stop time-out within which its workers must report their errors


class Jobs:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox; `release_values(job)` removes the values of a job's ranks as soon as no
    client needs them. `submitted`: how many jobs the cluster has had.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        cluster: Callable[[], ClusterState],
        agents: Agents,
        workers: Workers,
        scripts: Scripts,
        pending: Pending,
        telemetry: Telemetry,
        snapshot_writer: SnapshotWriter,
        post: Callable[[ev.Event], None],
        release_values: Callable[[str], None],
        submitted: int,
    ) -> None:
        self._settings, self._cluster, self._agents, self._workers = settings, cluster, agents, workers
        self._scripts, self._pending, self._telemetry = scripts, pending, telemetry
        self._snapshot_writer, self._post, self._release_values = snapshot_writer, post, release_values
        self._loop = asyncio.get_running_loop()
        self.submitted = submitted
        self.runs: dict[str, JobRun] = {}
        self.swaps = Swaps(pending, snapshot_writer, post)
        self.results = Results(settings.run_folder / "results", lambda w, message: workers.send((w,), message))

    @property
    def present(self) -> str:
        """The name of the job (also a script) that has not ended; empty if there is none."""
        return next((name for name, run in self.runs.items() if not run.future.done()), "")

    def submit(self, run: JobRun, saved: SavedJob) -> None:
        """Submit a job or script. OSError, and no job, if it cannot be saved."""
        self._snapshot_writer.save_new_job(saved)
        self.submitted += 1
        self._add(run)
        self._telemetry.begin_job(self._cluster().highest_generation)
        with contextlib.suppress(OSError):  # without the folder, results are fetched
            make_private(self.results.folder(run.name))
        if saved.script is None:
            self._post(ev.JobSubmitted(run.name))
        else:
            self._scripts.submit(run, *saved.script)

    def _add(self, run: JobRun) -> None:
        """Keep a run and the last one that has ended: messages of its workers may still arrive."""
        for name in [name for name, other in self.runs.items() if other.future.done()][:-1]:
            del self.runs[name]
            self._release_values(name)
        self.runs[run.name] = run
        self._pending.track(run.future)

    def receive(
        self,
        message: worker_messages.ProgramResult
        | worker_messages.SwapReport
        | worker_messages.ResultPiece
        | worker_messages.FetchCall
        | messages.WorkerOutput,
    ) -> None:
        """Handle a worker's message about its program."""
        match message:
            case worker_messages.ProgramResult(worker=w, job=job):
                self.results.receive(message, partial(self._on_program_ended, w, job))
            case worker_messages.SwapReport(worker=w):
                members = self._cluster().members
                self.swaps.receive(message, members.index(w) if w in members else None)
            case worker_messages.ResultPiece():
                self.results.receive_piece(message)
            case worker_messages.FetchCall(job=job):
                if job in self.runs:
                    self._send_call(message, self.runs[job])
            case messages.WorkerOutput(job=job):
                if job in self.runs:  # output of one job may arrive after the next has begun
                    self.runs[job].add_output(message)
                self._snapshot_writer.append_output(message)

    def _on_program_ended(self, w: WorkerId, job: str, outcome: Outcome) -> None:
        """A worker's program has ended, and its value is available."""
        self._post(ev.ProgramEnded(w, job, outcome.error))
        if job in self.runs:
            self.runs[job].add_outcome(w, outcome)

    def run_program(self, w: WorkerId, job: str) -> None:
        """Have a worker run the job's program. If the program is lost, its end is posted in a later turn of the event loop."""
        self._telemetry.steps.pop(w, None)
        program = self.runs[job].program
        if program is None or (program.call is not None and not _is_complete(program.call)):
            self._loop.call_soon(self._on_program_ended, w, job, Outcome(_lost_program(job)))
            return
        self._workers.send((w,), self._for_worker(program, w))

    def try_program(self, command: cmd.TryProgram) -> None:
        """Have workers run a new program inside the job's one."""
        run = self.runs[self.present]
        program = self.swaps.program(command.program) if command.on_trial else run.program
        if program is None:  # cancelled; or it is lost, as at the start of a worker
            for w in command.workers:
                self._loop.call_soon(self._post, SwapFailed(w, command.program, _lost_program(run.name)))
            return
        for w in command.workers:
            new = worker_messages.NewProgram(self._for_worker(program, w), command.generation, command.on_trial)
            self._workers.send((w,), new)

    def _for_worker(self, program: worker_messages.Program, w: WorkerId) -> worker_messages.Program:
        call, results = program.call, str(self.results.folder(program.job))
        if not self._agents.has_local_agent(w.host):  # another machine sees no file of this one
            results = ""
            call = messages.Blob(call.size, call.data) if call is not None else None
        log_dir, workers = str(self._settings.log_dir / program.job), len(self._cluster().workers)
        return replace(
            program, log_dir=log_dir, call=call, results=results, workers=workers, cluster=self._settings.number
        )

    def keep_program(self, command: cmd.KeepProgram) -> None:
        """Save the job's program, if it is a new one, then tell the workers."""
        self.swaps.keep(command.program)
        self.swaps.reject(command.rejected, command.why)
        self._workers.send(command.workers, worker_messages.KeepProgram(command.program))

    def _send_call(self, fetch: worker_messages.FetchCall, run: JobRun) -> None:
        """Send the next pieces of a program that is too long for one message."""
        program = self.swaps.program(fetch.number) or run.numbered(fetch.number)
        call = program.call if program is not None else None
        if call is not None and call.path:
            for offset, data in pickling.pieces(pickling.mapped(Path(call.path)), fetch.offset):
                piece = worker_messages.CallPiece(fetch.job, offset, data, fetch.number)
                self._workers.send((fetch.worker,), piece)

    def end(self, command: cmd.EndJob) -> None:
        """End the job. Its future is resolved when the culprit's error has arrived, or after a while without it."""
        run = self.runs[command.job]
        run.end(command)
        if not run.future.done():
            timeout = self._cluster().limits.timeouts.stop + ERROR_TIMEOUT
            self._loop.call_later(timeout, partial(run.resolve, force=True))

    # ---- the newest job of the previous driver ----

    def load(self, job: SavedJob | None) -> None:
        """Load the saved job, and remove values of other jobs. Workers report its end only after this call."""
        if job is not None:
            self._add(JobRun(job.name, job.program))
        self.results.remove_all_but(list(self.runs))
        self._snapshot_writer.load_output_and_telemetry(self.runs, self._telemetry)

    def resume(self, saved: SavedJob | None, reports: TakeoverReports) -> None:
        """Let the saved job go on after the takeover. It begins if the last driver was killed before, or has ended."""
        self._scripts.skip_numbers(reports.agents.values())
        if saved is not None and saved.script is not None:
            self._resume_script(saved, reports)
            return
        cluster = self._cluster()
        job = cluster.job
        if saved is not None and (job is None or job.name != saved.name):
            self._post(ev.JobSubmitted(saved.name))
        elif job is not None and job.outcome and job.name in self.runs:
            workers = [w for w, report in reports.workers.items() if report.job == job.name and w in cluster.workers]
            end = cmd.EndJob(job.name, job.outcome, job.reason, job.ranks)
            self._end_after_reports(self.runs[job.name], workers, end)

    def _resume_script(self, job: SavedJob, reports: TakeoverReports) -> None:
        """End the saved script if it had ended, with or without a driver; else start its workers again."""
        agents = reports.agents
        codes = [agents[host].ended.get(node) if host in agents else None for host, node in job.nodes.items()]
        if job.over is None and codes and all(code == 0 for code in codes):
            end = cmd.EndJob(job.name, "succeeded", "every worker ended well while there was no driver", ())
            job = replace(job, over=end)
            self._snapshot_writer.update_job(over=end)
        if job.over is not None:
            self.runs[job.name].end(job.over)
        else:
            self._scripts.restart(self.runs[job.name], job, {host: agent.nodes for host, agent in agents.items()})

    def _end_after_reports(self, run: JobRun, workers: Sequence[WorkerId], end: cmd.EndJob) -> None:
        """End a job that was over when the last driver ended, after its workers have reported how their programs ended."""

        def have_reported(cluster: ClusterState) -> bool | None:
            return True if all(w in run.outcomes or w not in cluster.workers for w in workers) else None

        def on_timeout() -> None:
            if self.results.is_fetching(workers):
                self._loop.call_later(RESULTS_TIMEOUT, on_timeout)
            else:
                run.end(end)

        reported: Future[bool] = Future()
        reported.add_done_callback(lambda _: run.end(end))
        self._pending.resolve(reported, have_reported)
        self._loop.call_later(RESULTS_TIMEOUT, on_timeout)


def _is_complete(call: messages.Blob) -> bool:
    """Whether the file of a call, if it is in one, has its full size."""
    try:
        return not call.path or os.path.getsize(call.path) == call.size
    except OSError:
        return False


def _lost_program(job: str) -> str:
    return f"the saved program of {job} is missing or damaged: run it again"
