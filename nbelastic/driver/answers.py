"""The driver's answers to the requests of its clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.driver import orders
from nbelastic.driver.agents import Fleet
from nbelastic.driver.discoveries import Discoveries
from nbelastic.driver.invitations import Invitations
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.orders import execute_on_all, execute_setup
from nbelastic.driver.pending import Pending
from nbelastic.driver.run import Run
from nbelastic.driver.snapshot import SavedJob
from nbelastic.driver.stacks import show_stacks
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol import requests as r
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status


def ready_workers(cluster: ClusterState) -> int:
    """How many workers can take code."""
    return sum(worker.state is WorkerState.READY for worker in cluster.workers.values())


def begun(cluster: ClusterState, low: int) -> bool | None:
    """Whether `low` workers are ready. HostError if no host is left that could start one: each is named with its reason."""
    if ready_workers(cluster) >= low:
        return True
    hosts = cluster.hosts.values()
    if hosts and all(host.phase is HostPhase.LOST for host in hosts):
        raise HostError("no host could be started: " + "; ".join(f"{host.spec.name}: {host.reason}" for host in hosts))
    return None


class Answers:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log; `save_arguments` keeps those of
    `Cluster` for clients and drivers to come.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        settings: Settings,
        fleet: Fleet,
        jobs: Jobs,
        pending: Pending,
        discoveries: Discoveries,
        invitations: Invitations,
        status: Callable[[], Status],
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        save_arguments: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._cluster, self._settings, self._fleet, self._jobs, self._pending = cluster, settings, fleet, jobs, pending
        self._discoveries, self._invitations, self._status = discoveries, invitations, status
        self._post, self._record, self._save_arguments = post, record, save_arguments

    def answer(self, request: r.AnyRequest, future: Future[Any]) -> None:
        """Resolve `future`, now or later. Raises what is wrong with the request."""
        match request:
            case r.WaitForStart(least=least):
                self._pending.resolve(future, lambda cluster: begun(cluster, least))
            case r.WaitForWorld(size=size):
                self._pending.resolve(future, lambda cluster: self._status_at_size(cluster, size))
            case r.Submit() | r.SubmitScript():
                self._submit(request, future)
            case r.StopJob(job=job, by=by):
                present = self._jobs.present
                if present and job in ("", present):
                    self._take_in(ev.JobStopRequested(present, f"stopped by {by}"), future)
                else:
                    future.set_result(True)
            case r.Execute() | r.ExecuteSetup() | r.ClearSetup():
                self._answer_about_cells(request, future)
            case r.AddHost() | r.RemoveHost() | r.Scale() | r.Restart() | r.Press():
                self._take_order(request, future)
            case r.ShowStacks(timeout=timeout):
                cluster = self._cluster()
                if cluster.active_script is not None:
                    raise UsageError("a script's workers cannot be asked where they are: use py-spy.")
                show_stacks(cluster, self._fleet, self._pending, status=self._status, timeout=timeout, found=future)
            case r.MakeConnectionFile(host=host):
                self._invitations.make(host, future)
            case r.FindController():
                self._pending.resolve(future, lambda _: self._controller())
            case r.Stop(by=by, within=within):
                self._post(ev.StopRequested(f"stopped by {by}", within))
                future.set_result(True)
            case r.Discover(source=source, arguments=arguments):
                self._discoveries.ask(source)
                if arguments is not None:
                    self._save_arguments(arguments)
                future.set_result(True)
            case r.HostsFound(key=key, hosts=hosts, text=text, failed=failed):
                self._discoveries.found_by_client(key, hosts, text, failed=failed)
                future.set_result(True)
            case _:
                assert_never(request)

    def _take_in(self, event: ev.Event, future: Future[Any]) -> None:
        """Answer when the event has been decided on: from then on the status shows it."""
        self._pending.resolve_after(event, future, lambda _: True)

    def _answer_about_cells(self, request: r.Execute | r.ExecuteSetup | r.ClearSetup, future: Future[Any]) -> None:
        cluster = self._cluster()
        if not isinstance(request, r.ClearSetup) and self._jobs.present:
            raise UsageError(f"{self._jobs.present} is running: cells run between jobs.")
        match request:
            case r.Execute(source=source):
                execute_on_all(cluster, self._fleet, self._pending, source, future)
            case r.ExecuteSetup(key=key, source=source):
                execute_setup(self._fleet, self._pending, key, source, future)
            case r.ClearSetup(key=key):
                known = [cell.key for cell in cluster.setup]
                if key and key not in known:
                    raise UsageError(f"there is no setup cell {key!r}; there are {', '.join(known) or 'none'}.")
                self._take_in(ev.SetupCleared(key), future)

    def _take_order(self, order: r.AddHost | r.RemoveHost | r.Scale | r.Restart | r.Press, future: Future[Any]) -> None:
        cluster = self._cluster()
        match order:
            case r.AddHost(host=host, by=by):
                self._take_in(orders.add_host(host, by).event, future)
            case r.RemoveHost(host=host, now=now, by=by):
                self._take_in(orders.remove_host(cluster, host, now, by).event, future)
            case r.Scale(min=low, max=high, by=by):
                self._take_in(orders.scale(cluster, low, high, True, by).event, future)
            case r.Restart(worker=worker, by=by):
                self._take_in(orders.restart(cluster, worker, by).event, future)
            case r.Press(message=message, slots=slots, by=by):
                noted, record = self._fleet.live.orders, self._record
                orders.take(message, slots, by, cluster=cluster, orders=noted, record=record, pending=self._pending)
                future.set_result(True)

    def _controller(self) -> r.ControllerFound | None:
        information = self._fleet.information
        if information is None:
            return None
        return r.ControllerFound(information, tuple(self._fleet.engines.values()))

    def _status_at_size(self, cluster: ClusterState, size: int) -> Status | None:
        """As soon as so many ranks train or, without a job, so many workers are ready."""
        if cluster.present_job:
            status = self._status()
            return status if status.phase == "running" and status.world_size == size else None
        return self._status() if ready_workers(cluster) == size else None

    def _submit(self, request: r.Submit | r.SubmitScript, future: Future[Any]) -> None:
        """Answer when the job has begun. No job is taken in that cannot be saved."""
        r.refuse_second_job(self._jobs.present)
        job = f"job-{self._jobs.submitted + 1}"
        run: Run | None = None
        try:
            if isinstance(request, r.Submit):
                program = replace(request.program, job=job, call=_named(request.program.call, job))
                run, saved = Run(job, program), SavedJob(job, program)
            else:
                run, saved = Run(job, None), SavedJob(job, script=(replace(request.script, job=job), request.terms))
            self._jobs.submit(run, saved)
        except OSError as error:
            if run is not None:
                run.forget_program()  # it would take the room that the next try needs
            raise r.not_saved(job, self._settings.run_dir, error) from None
        self._pending.resolve(future, lambda cluster: _begun(cluster, run))


def _begun(cluster: ClusterState, run: Run) -> str | None:
    return run.name if cluster.present_job == run.name or run.future.done() else None


def _named(call: messages.Blob | None, job: str) -> messages.Blob | None:
    """The file of a call gets the job's name."""
    if call is None or not call.path:
        return call
    return replace(call, path=str(Path(call.path).rename(Path(call.path).with_name(f"{job}.program"))))
