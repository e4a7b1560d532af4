"""The driver's answers to the requests of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, HostPhase
from nbelastic.driver import change_requests
from nbelastic.driver.agents import Agents
from nbelastic.driver.cells import Cells
from nbelastic.driver.code_versions import CodeVersions
from nbelastic.driver.connection_files import ConnectionFiles
from nbelastic.driver.debuggers import Debuggers
from nbelastic.driver.discoveries import Discoveries
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.engines import Engines
from nbelastic.driver.faults import Faults
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.pending import Pending
from nbelastic.driver.stack_dumps import collect_stack_dumps
from nbelastic.driver.state_pulls import StatePulls
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.driver.world_waits import WorldWaits, ready
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol import requests as r
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status


def ready_workers(cluster: ClusterState) -> int:
    """How many workers can run code."""
    return len(ready(cluster))


def has_ready_workers(cluster: ClusterState, least: int) -> bool | None:
    """True if so many workers are ready, else None. HostError, with the reasons, if all hosts are lost."""
    if ready_workers(cluster) >= least:
        return True
    hosts = cluster.hosts.values()
    if hosts and all(host.phase is HostPhase.LOST for host in hosts):
        names: dict[str, list[str]] = {}
        for host in hosts:
            names.setdefault(host.reason, []).append(host.spec.name)
        raise HostError(
            "no host could be started: " + "; ".join(f"{', '.join(each)}: {why}" for why, each in names.items())
        )
    return None


class RequestAnswers:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, and `record` adds to the event log. `save_arguments` keeps the
    arguments of `Cluster` for later clients and drivers.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        settings: Settings,
        agents: Agents,
        workers: Workers,
        engines: Engines,
        cells: Cells,
        code_versions: CodeVersions,
        jobs: Jobs,
        state_pulls: StatePulls,
        debuggers: Debuggers,
        faults: Faults,
        telemetry: Telemetry,
        pending: Pending,
        discoveries: Discoveries,
        connection_files: ConnectionFiles,
        status: Callable[[], Status],
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        save_arguments: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._cluster, self._settings, self._agents, self._workers = cluster, settings, agents, workers
        self._cells, self._jobs, self._telemetry, self._pending = cells, jobs, telemetry, pending
        self._discoveries, self._connection_files, self._status = discoveries, connection_files, status
        self._post, self._record, self._save_arguments = post, record, save_arguments
        self._state_pulls, self._engines = state_pulls, engines
        self._debuggers, self._code_versions, self._faults = debuggers, code_versions, faults
        self._world_waits = WorldWaits(workers, telemetry, pending, status)

    def answer(self, request: r.AnyRequest, future: Future[Any], on_piece: r.OnPiece = r.ignore_piece) -> None:
        """Resolve `future`, now or later, after calls of `on_piece`. Raises the error of an invalid request."""
        match request:
            case r.WaitForStart(least=least):
                self._pending.resolve(future, lambda cluster: has_ready_workers(cluster, least))
            case r.WaitForWorld(size=size):
                self._world_waits.wait(size, future)
            case r.Submit() | r.SubmitScript():
                self._submit(request, future)
            case r.SendCode(version=version):
                self._code_versions.send(version, future)
            case r.StopJob(job=job, by=by):
                present = self._jobs.present
                if present and job in ("", present):
                    self._answer_after(ev.JobStopRequested(present, f"stopped by {by}"), future)
                else:
                    future.set_result(True)
            case r.ExecuteAtCommit() | r.Swap() | r.Pause() | r.Step():
                self._answer_about_halts(request, future, on_piece)
            case r.Execute() | r.ExecuteSetup() | r.ClearSetup() | r.Push():
                self._answer_about_cells(request, future, on_piece)
            case r.Debug():
                self._debuggers.answer(request, future)
            case r.PullState():
                self._state_pulls.pull(request, future)
            case r.AddHost() | r.RemoveHost() | r.Scale() | r.Restart() | r.Resume() | r.DashboardAction():
                self._answer_about_changes(request, future)
            case r.RequestFault():
                future.set_result(self._faults.inject(request))
            case r.ShowStacks(timeout=timeout):
                self._collect_stack_dumps(timeout, future)
            case r.ShowStepTimes():
                future.set_result(self._telemetry.step_times.show(self._telemetry.slow_ranks.text))
            case r.MakeConnectionFile(host=host):
                self._connection_files.create(host, future)
            case r.FindController(timeout=timeout):
                self._find_controller(timeout, future)
            case r.Stop(by=by, within=within):
                self._post(ev.StopRequested(f"stopped by {by}", within))
                future.set_result(True)
            case r.SetDiscovery(source=source, arguments=arguments):
                self._discoveries.use(source)
                if arguments is not None:
                    self._save_arguments(arguments)
                future.set_result(True)
            case r.HostsFound(key=key, hosts=hosts, text=text, failed=failed):
                self._discoveries.receive_from_client(key, hosts, text, failed=failed)
                future.set_result(True)
            case _:
                assert_never(request)

    def _answer_after(self, event: ev.Event, future: Future[Any]) -> None:
        """Answer when the driver has decided on the event: from then on the status shows it."""
        self._pending.resolve_after(event, future, lambda _: True)

    def _answer_about_cells(
        self, request: r.Execute | r.ExecuteSetup | r.ClearSetup | r.Push, future: Future[Any], on_piece: r.OnPiece
    ) -> None:
        cluster = self._cluster()
        if isinstance(request, r.Execute | r.ExecuteSetup) and self._jobs.present:
            raise UsageError(f"{self._jobs.present} is running: cells run between jobs.")
        match request:
            case r.Execute(source=source):
                self._cells.execute_on_all(cluster, source, future, on_piece)
            case r.ExecuteSetup(key=key, source=source):
                self._cells.try_setup(key, source, future, on_piece)
            case r.Push(pushed=pushed):
                r.refuse_push(self._jobs.present)
                self._cells.push(pushed, future)
                future.add_done_callback(lambda _: self._cells.remove_unused_values(self._cluster()))
            case r.ClearSetup(key=key):
                known = [cell.key for cell in cluster.setup]
                if key and key not in known:
                    raise UsageError(f"there is no setup cell {key!r}; there are {', '.join(known) or 'none'}.")
                self._answer_after(ev.SetupCleared(key), future)
                future.add_done_callback(lambda _: self._cells.remove_unused_values(self._cluster()))

    def _answer_about_halts(
        self, request: r.ExecuteAtCommit | r.Swap | r.Pause | r.Step, future: Future[Any], on_piece: r.OnPiece
    ) -> None:
        """Answer when the cell has ended, the program was replaced, or all ranks stand still. A script makes no commits that the driver knows of."""
        change_requests.check_trains(self._cluster())
        match request:
            case r.ExecuteAtCommit():
                self._cells.execute_at_commit(request, future, on_piece)
            case r.Swap():
                self._jobs.swaps.submit(request, self._jobs.runs[self._jobs.present], self._cluster(), future)
            case r.Pause(by=by):
                self._pending.resolve_after(ev.PauseRequested(by), future, change_requests.is_paused)
            case r.Step(by=by, steps=steps):
                self._pending.resolve_after(ev.StepsRequested(steps, by), future, change_requests.is_paused)

    def _answer_about_changes(
        self,
        request: r.AddHost | r.RemoveHost | r.Scale | r.Restart | r.Resume | r.DashboardAction,
        future: Future[Any],
    ) -> None:
        cluster = self._cluster()
        match request:
            case r.AddHost(host=host, by=by):
                change = change_requests.add_host(host, by)
            case r.RemoveHost(host=host, now=now, by=by, within=within):
                change = change_requests.remove_host(cluster, host, now, by, within)
            case r.Scale(min=low, max=high, by=by):
                change = change_requests.scale(cluster, low, high, True, by)
            case r.Restart(worker=worker, by=by):
                change = change_requests.restart_worker(cluster, worker, by)
            case r.Resume(by=by):
                change = change_requests.resume(cluster, by)
            case r.DashboardAction(by=by):
                shown, record, pending = self._telemetry.requests, self._record, self._pending
                change_requests.request_by_button(
                    request, by, cluster=cluster, shown=shown, record=record, pending=pending
                )
                future.set_result(True)
                return
        self._answer_after(change.event, future)

    def _collect_stack_dumps(self, timeout: float, future: Future[Any]) -> None:
        cluster = self._cluster()
        if cluster.active_script is not None:
            raise UsageError("nbelastic cannot show the stacks of a script's workers: use py-spy.")
        collect_stack_dumps(
            cluster,
            self._workers,
            self._telemetry,
            self._pending,
            status=self._status,
            timeout=timeout,
            result=future,
        )

    def _find_controller(self, timeout: float, future: Future[Any]) -> None:
        def stop_waiting() -> None:
            if not future.done():
                self._engines.stop_waiting(self._cluster())

        self._engines.request(self._cluster())
        self._pending.resolve(future, self._engines.find)
        asyncio.get_running_loop().call_later(timeout, stop_waiting)

    def _submit(self, request: r.Submit | r.SubmitScript, future: Future[Any]) -> None:
        """Answer when the job has begun. A job that cannot be saved is refused."""
        r.refuse_second_job(self._jobs.present)
        job = f"job-{self._jobs.submitted + 1}"
        run: JobRun | None = None
        try:
            if isinstance(request, r.Submit):
                program = replace(request.program, job=job, call=_renamed(request.program.call, job))
                run, saved = JobRun(job, program), SavedJob(job, program)
            else:
                run, saved = JobRun(job, None), SavedJob(job, script=(replace(request.script, job=job), request.terms))
            self._jobs.submit(run, saved)
        except OSError as error:
            if run is not None:
                run.forget_program()  # its file would take the disk space that the next try needs
            raise r.not_saved(job, self._settings.run_folder, error) from None
        self._pending.resolve(future, lambda cluster: _name_if_begun(cluster, run))


def _name_if_begun(cluster: ClusterState, run: JobRun) -> str | None:
    return run.name if cluster.present_job == run.name or run.future.done() else None


def _renamed(call: messages.Blob | None, job: str) -> messages.Blob | None:
    """Rename the file of a call after its job."""
    if call is None or not call.path:
        return call
    return replace(call, path=str(Path(call.path).rename(Path(call.path).with_name(f"{job}.program"))))
