"""Builds the parts of the driver that need the message server and the event loop, and connects them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.background_tasks import BackgroundTasks
from nbelastic.driver.cells import Cells
from nbelastic.driver.clock import Clock
from nbelastic.driver.code_versions import CodeVersions
from nbelastic.driver.command_executor import CommandExecutor
from nbelastic.driver.debuggers import Debuggers
from nbelastic.driver.dependencies import Dependencies, MessageServer
from nbelastic.driver.discoveries import Discoveries
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.driver.engines import Engines
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.faults import Faults
from nbelastic.driver.internal_errors import InternalErrors
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.liveness import Liveness
from nbelastic.driver.metrics_server import MetricsServer
from nbelastic.driver.pending import Pending
from nbelastic.driver.received_messages import ReceivedMessages
from nbelastic.driver.request_answers import RequestAnswers
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.state_pulls import StatePulls
from nbelastic.driver.takeover import TakeoverReports
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.workers import Workers
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system.folder_paths import code_folder
from nbelastic.transport.keys import Keys


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the parts share. `record(record)` adds to the event log now, `record_at(record, now)` at that time."""

    settings: Settings
    dependencies: Dependencies
    server: MessageServer
    keys: Keys
    clock: Clock
    telemetry: Telemetry
    event_log: EventLog
    internal_errors: InternalErrors
    tasks: BackgroundTasks
    pending: Pending
    snapshot_writer: SnapshotWriter
    cluster: Callable[[], ClusterState]
    status: Callable[[], Status]
    post: Callable[[ev.Event], None]
    decide_now: Callable[[ev.Event], None]
    record: Callable[[cmd.Record], None]
    record_at: Callable[[cmd.Record, float], None]
    save: Callable[[], None]
    save_arguments: Callable[[Mapping[str, Any]], None]
    release_values: Callable[[str], None]
    publish: Callable[[], None]
    publish_soon: Callable[[], None]
    update_clients: Callable[[], None]


class Components:
    """`reports`: collects reports during a takeover, else None. `submitted`: how many jobs the cluster has had."""

    def __init__(self, shared: Shared, reports: TakeoverReports | None, submitted: int) -> None:
        self._build_agents(shared)
        self._build_jobs(shared, submitted)
        self._build_message_handling(shared, reports)
        settings, counts = shared.settings, shared.event_log.counts
        self.metrics = MetricsServer(settings.run_folder, settings.metrics_port, shared.status, lambda: counts)
        self.answers = RequestAnswers(
            cluster=shared.cluster,
            settings=shared.settings,
            agents=self.agents,
            workers=self.workers,
            engines=self.engines,
            cells=self.cells,
            code_versions=self.code_versions,
            jobs=self.jobs,
            state_pulls=self.state_pulls,
            debuggers=self.debuggers,
            faults=Faults(self.agents, shared.cluster, shared.record, is_allowed=settings.chaos),
            telemetry=shared.telemetry,
            pending=shared.pending,
            discoveries=self.discoveries,
            connection_files=self.scripts.connection_files,
            status=shared.status,
            post=shared.post,
            record=shared.record,
            save_arguments=shared.save_arguments,
        )

    def _build_agents(self, shared: Shared) -> None:
        self.agents = Agents(
            shared.settings,
            shared.server,
            shared.keys,
            clock=shared.clock,
            telemetry=shared.telemetry,
            dependencies=shared.dependencies,
            post=shared.post,
            record=shared.record,
            save=shared.save,
            changed=shared.publish_soon,
        )
        self.workers = Workers(shared.server, self.agents, shared.clock, shared.telemetry, shared.post)
        self.engines = Engines(
            shared.settings,
            shared.dependencies.controller,
            self.agents,
            self.workers,
            record=shared.record,
            report=shared.internal_errors.report,
            save=shared.save,
            changed=shared.publish_soon,
        )
        self.debuggers = Debuggers(self.workers, shared.pending)
        folder, saved = shared.settings.run_folder, shared.snapshot_writer
        self.code_versions = CodeVersions(
            code_folder(folder),
            self.agents,
            shared.pending,
            saved,
            self._job_code,
            save=shared.save,
            record=shared.record,
        )
        self.cells = Cells(
            self.workers,
            self.agents,
            shared.pending,
            self.code_versions,
            post=shared.post,
            values=folder / "pushed",
        )
        self.liveness = Liveness(
            shared.settings,
            self.agents,
            self.workers,
            telemetry=shared.telemetry,
            clock=shared.clock,
            cluster=shared.cluster,
            post=shared.post,
            record=shared.record,
        )
        self.discoveries = Discoveries(shared.post, shared.record, shared.tasks.start)

    def _job_code(self) -> str:
        """The code version of the newest job."""
        run = next(reversed(self.jobs.runs.values()), None)
        return run.program.code if run is not None and run.program is not None else ""

    def _build_jobs(self, shared: Shared, submitted: int) -> None:
        self.scripts = Scripts(
            cluster=shared.cluster,
            settings=shared.settings,
            clock=shared.clock,
            server=shared.server,
            agents=self.agents,
            snapshot_writer=shared.snapshot_writer,
            internal_errors=shared.internal_errors,
            keys=shared.keys.for_clients(),
            decide=shared.decide_now,
            post=shared.post,
            publish=shared.update_clients,
            start_task=shared.tasks.start,
        )
        self.jobs = Jobs(
            settings=shared.settings,
            cluster=shared.cluster,
            agents=self.agents,
            workers=self.workers,
            scripts=self.scripts,
            pending=shared.pending,
            telemetry=shared.telemetry,
            snapshot_writer=shared.snapshot_writer,
            post=shared.post,
            release_values=shared.release_values,
            submitted=submitted,
        )
        self.state_pulls = StatePulls(
            shared.settings.run_folder / "states",
            cluster=shared.cluster,
            cells=self.cells,
            jobs=self.jobs,
            workers=self.workers,
            pending=shared.pending,
        )

    def adopt(self, previous: DriverSnapshot) -> None:
        """Take over the agents of the previous driver, and ipyparallel's controller, if there is one."""
        self.agents.adopt(previous)
        if previous.controller:
            self.engines.start(attach=True)

    def forget(self, lost: Collection[WorkerId]) -> None:
        """These workers are lost: expect nothing of them."""
        self.jobs.results.forget(lost)
        self.state_pulls.forget(lost)
        self.cells.forget(lost)
        self.debuggers.forget(lost)
        self.workers.forget(lost)
        self.engines.forget(lost)

    def _build_message_handling(self, shared: Shared, reports: TakeoverReports | None) -> None:
        self.executor = CommandExecutor(
            cluster=shared.cluster,
            agents=self.agents,
            workers=self.workers,
            cells=self.cells,
            jobs=self.jobs,
            scripts=self.scripts,
            event_log=shared.event_log,
            record=shared.record_at,
            log_dir=shared.settings.log_dir,
        )
        self.received_messages = ReceivedMessages(
            cluster=shared.cluster,
            clock=shared.clock,
            server=shared.server,
            agents=self.agents,
            workers=self.workers,
            engines=self.engines,
            cells=self.cells,
            code_versions=self.code_versions,
            jobs=self.jobs,
            state_pulls=self.state_pulls,
            debuggers=self.debuggers,
            scripts=self.scripts,
            telemetry=shared.telemetry,
            snapshot_writer=shared.snapshot_writer,
            event_log=shared.event_log,
            stall_detector=self.liveness.stall_detector,
            takeover=reports,
            post=shared.post,
            record=shared.record,
            publish=shared.publish,
            publish_soon=shared.publish_soon,
        )
