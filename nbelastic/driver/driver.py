"""The driver: builds its parts, serves until the cluster has stopped, or takes over from the previous driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.background_tasks import BackgroundTasks
from nbelastic.driver.client_lease import stop_when_abandoned
from nbelastic.driver.clients import Clients
from nbelastic.driver.components import Components, Shared
from nbelastic.driver.decisions import Decision, Decisions
from nbelastic.driver.dependencies import REAL, Dependencies
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.driver.event_log import EVENTS, EventLog
from nbelastic.driver.internal_errors import InternalErrors
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.liveness import MAX_CHECK_DELAY
from nbelastic.driver.pending import Pending
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.status import snapshot
from nbelastic.driver.takeover import TakeoverReports, resume_cluster
from nbelastic.driver.telemetry import Telemetry
from nbelastic.errors import ClusterStoppedError, HostError
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol.requests import AnyRequest, DashboardAction, OnPiece, Stop, ignore_piece
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system.addresses import split_endpoint
from nbelastic.system.future_results import resolve_if_pending
from nbelastic.transport.keys import Keys

FAILURE_KINDS = ("worker-lost", "host-lost", "world-broken")  # of records


class Driver:
    """Manages one cluster. All of it runs in one thread."""

    def __init__(
        self,
        settings: Settings,
        run_folder: RunFolder,
        snapshot_writer: SnapshotWriter,
        dependencies: Dependencies = REAL,
        *,
        submitted: int = 0,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`run_folder`: held by the caller; the driver releases it at its end, or leaves it to the next driver.

        `submitted`: how many jobs the cluster has had. `arguments`: those of `Cluster`, for clients; None: there are no clients.
        """
        self.settings = settings
        self._dependencies = dependencies
        self._run_folder = run_folder
        self._snapshot_writer = snapshot_writer
        self._clock = dependencies.clock(settings.heartbeat + MAX_CHECK_DELAY)
        if snapshot_writer.previous is not None:
            self._clock.skipped = snapshot_writer.previous.skipped
        self.event_log = EventLog(settings.log_dir / EVENTS, append=snapshot_writer.previous is not None)
        self.telemetry = Telemetry(log_dir=str(settings.log_dir))
        self.internal_errors = InternalErrors(settings.name, self.record)
        self._tasks = BackgroundTasks(self.internal_errors.report)
        self._has_clients = arguments is not None
        self._clients = Clients(self, run_folder.path, arguments or {}, snapshot_writer.term, self._clock.now)
        self._submitted_before = submitted
        self._decisions = Decisions(
            settings.limits,
            self._clock,
            self.event_log,
            self.internal_errors,
            is_stale=self._is_stale,
            save=self.save,
            execute=self._execute,
            after_decisions=self._after_decisions,
            on_failure=self.stop_deciding,
        )
        self._pending = Pending(lambda: self.cluster, self.post, self._stopped_error, self.update_clients)
        self._failure: BaseException | None = None
        self._is_publish_scheduled = False

    @property
    def cluster(self) -> ClusterState:
        """The present cluster state."""
        return self._decisions.cluster

    def request(self, request: AnyRequest, on_piece: OnPiece = ignore_piece) -> Future[Any]:
        """The answer to a request, or its error. ClusterStoppedError if the driver cannot answer it."""
        future: Future[Any] = self._pending.track(Future())
        may_stop = isinstance(request, DashboardAction | Stop)  # a button may be the one that stops the cluster
        if self.internal_errors.decision_failure and not may_stop:
            resolve_if_pending(future.set_exception, self._stopped_error())
            return future
        try:
            self._components.answers.answer(request, future, on_piece)
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            resolve_if_pending(future.set_exception, error)
        return future

    def post(self, event: ev.Event) -> None:
        """Put an event into the inbox."""
        self._decisions.post(event)

    def record(self, record: cmd.Record) -> None:
        """Add a record to the event log."""
        self._record(record, self._clock.now())
        self.save()
        self.update_clients()

    def _record(self, record: cmd.Record, now: float) -> None:
        if record.kind in FAILURE_KINDS:
            self.telemetry.failed_at = time.time()
        self.event_log.record(record, now, self.cluster.size)

    async def serve(self, ready: Callable[[], object] = lambda: None) -> None:
        """Run the driver until the cluster has stopped. `ready()` is called as soon as it takes requests.

        In the end the driver informs all clients and releases the cluster's name. If the driver fails, the cluster goes on, and
        the next driver gets its name.
        """
        try:
            await self._main(ready)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            goes_on = self._snapshot_writer.has_snapshot and self._failure is not None
            self._run_folder.release(keep_folder=goes_on)
            self._clients.disconnect_all(None if goes_on else self.why_ended)

    async def _main(self, ready: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self.internal_errors.on_callback_error)
        previous = self._snapshot_writer.previous
        reports = TakeoverReports(previous, self.settings.silence) if previous is not None else None
        await self._start_server(previous)
        self._components = self._build(reports)
        self.jobs = self._components.jobs
        try:
            if previous is not None and reports is not None:
                self.jobs.load(previous.job)
                self._components.adopt(previous)
                await reports.wait(self._components.agents.has_agent, self._clock.now)
                self._take_over(previous, reports)
            else:
                self._decisions.begin()
                self._start_saving()
            self._snapshot_writer.save()
            self._publish()
            if self._has_clients:
                await self._clients.start()
            ready()
            self._start_tasks()
            self._components.discoveries.use(self.settings.discovery)
            await self._decisions.run()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            if self._failure is None:
                await self._end()

    async def _start_server(self, previous: DriverSnapshot | None) -> None:
        """Listen at the address of the previous driver, if there was one: agents and workers connect to it again."""
        self._keys = previous.keys if previous is not None else Keys.make()
        self._term = self._snapshot_writer.term
        self._server = self._dependencies.server(
            self._keys, self._on_message, self.settings.heartbeat, self._term, self._is_known
        )
        port = split_endpoint(previous.address)[1] if previous is not None else 0
        try:
            await self._server.start(port=port)
        except OSError as error:
            raise HostError(
                f"the driver cannot listen: {error.strerror}; end the process that uses the port, then try again."
            ) from None

    def _build(self, reports: TakeoverReports | None) -> Components:
        shared = Shared(
            settings=self.settings,
            dependencies=self._dependencies,
            server=self._server,
            keys=self._keys,
            clock=self._clock,
            telemetry=self.telemetry,
            event_log=self.event_log,
            internal_errors=self.internal_errors,
            tasks=self._tasks,
            pending=self._pending,
            snapshot_writer=self._snapshot_writer,
            cluster=lambda: self.cluster,
            status=lambda: self.status,
            post=self.post,
            decide_now=self._decisions.decide_now,
            record=self.record,
            record_at=self._record,
            save=self.save,
            save_arguments=self._save_arguments,
            release_values=self._clients.release_values,
            publish=self._publish,
            publish_soon=self._publish_soon,
            update_clients=self.update_clients,
        )
        return Components(shared, reports, self._submitted_before)

    def _start_tasks(self) -> None:
        self._tasks.keep("the check of the TCP proxies", self._components.agents.watch_tcp_proxies)
        self._tasks.keep_detecting("the check for silent hosts and workers", self._components.liveness.watch)
        self._tasks.keep_detecting("the check of the batch jobs", self._components.agents.watch_batch_jobs)
        if self._has_clients:
            self._tasks.keep("the metrics", self._components.metrics.serve)
            lease = None if self.settings.owner else self.settings.lease
            self._tasks.keep(
                "the check for an abandoned cluster",
                lambda: stop_when_abandoned(lease, self._clients, self._run_folder, self.post),
            )

    def _start_saving(self) -> None:
        """Save from now on. During a takeover, the previous driver's snapshot must stay: this driver may be killed, too."""
        self._snapshot_writer.start_saving(
            cluster=lambda: self.cluster,
            clock=self._clock,
            settings=self.settings,
            address=self._server.address,
            keys=self._keys,
            agents=self._components.agents,
            engines=self._components.engines,
        )

    def _take_over(self, previous: DriverSnapshot, reports: TakeoverReports) -> None:
        """All live agents and workers have reported, or their time is up: go on with those that have."""
        now = self._clock.now()
        self._components.received_messages.takeover = None
        self._decisions.cluster, commands = resume_cluster(previous, reports, now, self.event_log)
        self._start_saving()
        self.record(cmd.Record("driver-came", f"driver {self._term} has taken over (process {os.getpid()})"))
        for report in reports.workers.values():
            if report.worker in self.cluster.workers:
                self._components.received_messages.adopt_worker(report)
        for w in self.cluster.workers.keys() - reports.workers.keys():
            self._components.workers.expect(w)
        for host in previous.agents.keys() - reports.agents.keys() - reports.coming:
            self._components.agents.give_up(host)
        for command in commands:
            self._components.executor.execute(command, now)
        self._decisions.set_deadline_timer(now)
        for event in reports.later:
            self.post(event)
        self.jobs.resume(previous.job, reports)
        self._components.cells.remove_unused_values(self.cluster)

    async def _end(self) -> None:
        """Close everything, from the last line to the first, even if one of them fails."""
        async with contextlib.AsyncExitStack() as stack:
            # At once after the controller's end, which would also remove the folder.
            stack.callback(self._run_folder.release)
            stack.push_async_callback(self._components.engines.stop)
            stack.push_async_callback(self._clients.close)
            stack.callback(self._pending.fail_all, close=True)
            stack.callback(self._snapshot_writer.close)
            stack.callback(self.event_log.close)
            for run in self.jobs.runs.values():
                stack.callback(run.abandon, f"the cluster {self.settings.name!r} was stopped")
            stack.callback(self._components.scripts.close)
            stack.push_async_callback(self._server.stop)
            stack.push_async_callback(self._components.agents.stop)
            stack.push_async_callback(self._stop_tasks)

    async def _stop_tasks(self) -> None:
        discovery = self._components.discoveries.stop()
        await self._tasks.stop([discovery] if discovery is not None else [])
        self._decisions.close()

    # ---- decisions ----

    def _is_stale(self, event: ev.Event) -> bool:
        return self._components.agents.is_superseded(event)

    def _execute(self, command: cmd.Command, now: float) -> None:
        self._components.executor.execute(command, now)

    def stop_deciding(self, event: ev.Event, error: Exception) -> None:
        """A decision has failed, so the cluster state may be wrong: make no more decisions, and leave the workers as they are."""
        self._components.discoveries.stop()
        self._tasks.stop_detecting()
        self._decisions.cancel_deadline_timer()
        self._components.executor.cancel_open_leave(self._clock.now())
        self.internal_errors.report_decision_failure(event, error)
        self._pending.fail_all()

    def _after_decisions(self, decided: Sequence[Decision]) -> None:
        commands = (command for decision in decided for command in decision.commands)
        starting = {command.worker.host for command in commands if isinstance(command, cmd.StartWorker)}
        if starting:
            self._components.workers.announce(starting, self.cluster)
        before = decided[0].before
        if self.cluster.removed_workers != before.removed_workers:
            self._components.forget(before.workers.keys() - self.cluster.workers.keys())
        self._decisions.set_deadline_timer(decided[-1].now)
        self._pending.on_decisions(event for decision in decided for event in decision.events)
        self._publish()

    def save(self) -> None:
        """Save the driver snapshot if it has changed. An error, as of a full disk, is reported; the next call tries again."""
        try:
            self._snapshot_writer.save()
        except Exception as error:  # noqa: BLE001  (the training does not need the snapshot)
            self.internal_errors.report("the cluster cannot be saved for another driver", error)

    # ---- messages and background tasks ----

    def _is_known(self, peer: str) -> bool:
        return self._components.received_messages.is_known(peer)

    def _on_message(self, peer: str, message: messages.Message | ev.Event) -> None:
        try:
            self._components.received_messages.handle(peer, message)
        except OSError as error:  # as of a full disk: the same for all workers
            self.internal_errors.report(f"{type(message).__name__} cannot be saved", error)
        except Exception as error:  # noqa: BLE001  (a bug of ours: other messages must be handled)
            self.internal_errors.report(f"{type(message).__name__} of {peer}", error)

    def _save_arguments(self, arguments: Mapping[str, Any]) -> None:
        """The arguments of `Cluster` have changed: keep them for later clients and the next driver."""
        self._clients.arguments = self._snapshot_writer.arguments = dict(arguments)
        self.save()

    def on_kernel_ended(self, within: float) -> None:
        """The kernel has ended that owns the cluster: stop it. Programs have `within` seconds to end."""
        self._clients.on_kernel_ended()
        self.post(ev.StopRequested("its kernel has ended", within))

    # ---- status and updates ----

    @property
    def status(self) -> Status:
        now = self._clock.read()
        status = self._components.scripts.add_to_status(
            snapshot(self.settings.name, self.cluster, self.telemetry, now), now
        )
        status = replace(status, time=status.time + self._clock.skipped)
        if self.internal_errors.decision_failure and not self.cluster.stopping:
            status = replace(status, reason=self.internal_errors.decision_failure)
        return status

    @property
    def runs(self) -> Mapping[str, JobRun]:
        """The runs of the present job and of the last one that has ended, by name."""
        return self.jobs.runs

    @property
    def submitted(self) -> int:
        """How many jobs the cluster has had."""
        return self.jobs.submitted

    def remove_values(self, job: str) -> None:
        """Remove the values of a job's ranks, because no client needs them any more."""
        self.jobs.results.remove(job)

    def _publish_soon(self) -> None:
        """Publish once for all messages that arrive in the same turn of the event loop."""
        if not self._is_publish_scheduled:
            self._is_publish_scheduled = True
            self._loop.call_soon(self._publish, False)

    def _publish(self, news: bool = True) -> None:
        """Resolve pending answers, and send clients what has changed. `news`: more than the status has."""
        self._is_publish_scheduled = False
        self._pending.check()
        self.update_clients(news)

    def update_clients(self, news: bool = True) -> None:
        """Send clients what has changed: soon, or later if only the status has (not `news`)."""
        self._clients.schedule_update(news=news)

    def _stopped_error(self) -> BaseException:
        """The exception for futures that the driver cannot resolve any more."""
        why = self.cluster.stopping
        text = f"the cluster {self.settings.name!r} has stopped{f': {why}' if why else ''}."
        if self.internal_errors.decision_failure and not why:
            text = f"{self.internal_errors.decision_failure}."
        return self._failure or ClusterStoppedError(text)

    @property
    def why_ended(self) -> str:
        """The reason why the cluster was stopped, or the failure of its driver."""
        failed = f"its driver failed: {self._failure!r}" if self._failure is not None else ""
        return self.cluster.stopping or failed
