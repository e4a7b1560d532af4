"""What the driver does with each message that agents, workers and nodes send."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, rank_text
from nbelastic.core.takeover import TOO_LATE, is_too_late
from nbelastic.driver.agents import Agents
from nbelastic.driver.cells import Cells
from nbelastic.driver.clock import Clock
from nbelastic.driver.code_versions import CodeVersions
from nbelastic.driver.debuggers import Debuggers
from nbelastic.driver.decisions import IN_BATCHES
from nbelastic.driver.dependencies import MessageServer
from nbelastic.driver.engines import Engines
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.liveness import StallDetector
from nbelastic.driver.replicas import AllDiffer
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.state_pulls import StatePulls
from nbelastic.driver.status import wall
from nbelastic.driver.takeover import Report, TakeoverReports
from nbelastic.driver.telemetry import Telemetry, numbers
from nbelastic.driver.workers import Workers
from nbelastic.protocol import agent_messages, cell_messages, code_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_reports import OwnTime, ReplicaHashes
from nbelastic.system import versions

T = TypeVar("T")

NOT_ALIKE = "does the program train without DistributedDataParallel, or change the model or the learning rate on some ranks only?"


class ReceivedMessages:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log, and `publish()` or `publish_soon()`
    sends clients what has changed. `takeover`: collects reports while this driver takes over from another one, else None.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        clock: Clock,
        server: MessageServer,
        agents: Agents,
        workers: Workers,
        engines: Engines,
        cells: Cells,
        code_versions: CodeVersions,
        jobs: Jobs,
        state_pulls: StatePulls,
        debuggers: Debuggers,
        scripts: Scripts,
        telemetry: Telemetry,
        snapshot_writer: SnapshotWriter,
        event_log: EventLog,
        stall_detector: StallDetector,
        takeover: TakeoverReports | None,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        publish: Callable[[], None],
        publish_soon: Callable[[], None],
    ) -> None:
        self._cluster, self._clock, self._server = cluster, clock, server
        self._agents, self._workers, self._cells, self._jobs, self._scripts = agents, workers, cells, jobs, scripts
        self._state_pulls, self._debuggers, self._code_versions = state_pulls, debuggers, code_versions
        self._telemetry, self._snapshot_writer, self._event_log = telemetry, snapshot_writer, event_log
        self._engines, self._stall_detector = engines, stall_detector
        self._post, self._record, self._publish, self._publish_soon = post, record, publish, publish_soon
        self.takeover = takeover
        self._environments: dict[str, int] = {}  # by host, the pid of the agent whose environment was recorded
        self._packages: dict[str, dict[str, str]] = {}  # by host, those of its environment for the requirements
        self._refused: dict[str, str] = {}  # by host, which preloaded modules its template has refused, and why

    def is_known(self, peer: str) -> bool:
        """Whether the server keeps the connection of this agent, worker or node, which has sent its first message.

        A lost worker is unknown: its last messages may arrive after its host's agent has reported its end.
        """
        role, _, name = peer.partition("/")
        if role == "worker":
            try:
                return self.takeover is not None or WorkerId.parse(name) in self._cluster().workers
            except ValueError:
                return False
        return role == "node" or (role == "agent" and peer == self._agents.peer_of(name.rpartition("~")[0]))

    def handle(self, peer: str, message: messages.Message | ev.Event) -> None:
        """Handle a message of this peer. TypeError for an unknown kind of message."""
        if peer.startswith("agent/") and not self._is_present_agent(peer, message):
            return
        if peer.startswith("node/"):
            if self.takeover is not None:
                self.takeover.add_node_event(message)
            self._scripts.receive(peer, self._stamped(message))
        elif self.takeover is not None and isinstance(message, Report):
            self.takeover.add(message)
        elif isinstance(message, ev.Event) and type(message) in IN_BATCHES:  # they come in thousands
            self._handle_event(message)
        else:
            self._handle_other(peer, message)

    def _handle_other(self, peer: str, message: messages.Message | ev.Event) -> None:
        match message:
            case agent_messages.NodeExited():
                self._scripts.on_node_exited(message)
            case worker_messages.WorkerReport():
                self._handle_late_report(message)
            case agent_messages.AgentHello():
                self._handle_agent_hello(message)
            case agent_messages.AgentEnding(host=host, within=within, reason=reason):
                self._post(ev.HostRemoved(host, by=reason, within=within, replaced=self._agents.replaces(host)))
            case agent_messages.AgentGoodbye(host=host, reason=reason):
                self._agents.lose(host, reason)
            case agent_messages.AgentSample():
                self._telemetry.add_sample(message, self._cluster().workers, self._clock.now())
                self._publish_soon()
            case worker_messages.WorkerHello():
                self._handle_worker_hello(message)
            case worker_messages.EngineConnected(worker=w, engine=engine, error=error):
                self._engines.connected(w, engine, error)
            case worker_messages.WorkerProgress():
                self._handle_progress(message)
            case worker_messages.FetchCall() if self._cells.send_pushed(message):
                pass
            case worker_messages.ProgramResult(value=messages.Blob(data=b"", path="")) if not self.is_known(peer):
                pass  # a lost worker sends no value any more; a host could fill the disk with values of workers that never were
            case (
                worker_messages.ProgramResult()
                | worker_messages.SwapReport()
                | worker_messages.ResultPiece()
                | worker_messages.FetchCall()
            ):
                self._jobs.receive(message)
                if isinstance(message, worker_messages.ResultPiece):
                    self._state_pulls.receive_piece(message)
            case messages.WorkerOutput():
                self._publish()  # soon; not after the next line, which fails on a full disk
                self._jobs.receive(self._stamped(message))
            case cell_messages.CellResult() | cell_messages.CellPiece() | cell_messages.StatePulled():
                self._handle_cell_message(message)
            case code_messages.FetchCode() | code_messages.CodeStored():
                self._code_versions.receive(message)
            case worker_messages.StackShown(worker=w):
                if w in self._cluster().workers:
                    self._telemetry.stacks[w] = message
                    self._publish()
            case ev.Event():
                self._handle_event(message)
            case _:
                raise TypeError(f"{peer} has sent {type(message).__name__}, which the driver does not know")

    def _stamped(self, message: Any) -> Any:
        """Output with the time at which it has arrived; other messages as they are."""
        if not isinstance(message, messages.WorkerOutput):
            return message
        return replace(message, at=round(self._wall(self._clock.now()), 3))

    def _wall(self, at: float) -> float:
        """The time of day at a time of the driver's clock."""
        return wall(self._clock.machine_time(at))

    def _is_present_agent(self, peer: str, message: messages.Message | ev.Event) -> bool:
        """Whether its host has no other agent. One that has just connected gets the user's modules first."""
        if peer != self._agents.peer_of(peer[6:].rpartition("~")[0]):  # an agent that was declared lost connects again
            self._server.send(peer, agent_messages.StopAgent())
            self._server.forget(peer)
            return False
        if isinstance(message, agent_messages.AgentHello):
            self._code_versions.send_all_to(message.host)
        return True

    def _handle_cell_message(
        self, message: cell_messages.CellResult | cell_messages.CellPiece | cell_messages.StatePulled
    ) -> None:
        match message:
            case cell_messages.CellResult():
                self._cells.receive_result(message)
            case cell_messages.CellPiece():
                self._cells.receive_piece(message)
            case cell_messages.StatePulled():
                self._state_pulls.receive(message)

    def _handle_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerFormed):
            self._event_log.note_worker_formed(event)
        elif isinstance(event, pev.BreakpointReached | pev.BreakpointLeft):
            self._debuggers.note(event)
        self._post(event)

    def _handle_agent_hello(self, message: agent_messages.AgentHello) -> None:
        host, problem = message.host, versions.difference(message.versions, versions.installed())
        untested = versions.untested(message.versions)
        if untested and not problem:
            self._record(cmd.Record("torch-untested", f"{host}: {untested}", host=host))
        if message.packages is not None:
            problem += " (in the environment for the requirements)" if problem else ""
            self._record_environment(message, message.packages)
        driver_address = self._agents.driver_address_for(host)
        ready = ev.AgentReady(host, message.pid, message.addresses, message.port, problem, driver_address, message.gpus)
        self._post(ready)

    def _record_environment(self, message: agent_messages.AgentHello, packages: dict[str, str]) -> None:
        """Once per agent, which may introduce itself twice."""
        host = message.host
        if self._environments.get(host) == message.pid:
            return
        self._environments = {**self._of_present_hosts(self._environments), host: message.pid}
        self._packages = {**self._of_present_hosts(self._packages), host: packages}
        found = ", ".join(f"{name} {version}" for name, version in packages.items()) or "none"
        text = f"{host} has an environment for the requirements; packages beside those of the host: {found}"
        self._record(cmd.Record("environment-ready", text, host=host))
        if different := versions.differing(self._packages, host):
            text = f"{host}: {different}: name exact versions in the requirements"
            self._record(cmd.Record("environment-differs", text, host=host))

    def _of_present_hosts(self, known: dict[str, T]) -> dict[str, T]:
        """The entries of hosts that have not left the cluster."""
        return {host: value for host, value in known.items() if host in self._cluster().hosts}

    def _handle_worker_hello(self, message: worker_messages.WorkerHello) -> None:
        w, refused = message.worker, message.refused
        if w in self._cluster().workers:
            self._register(w)
        if refused and self._refused.get(w.host) != refused:
            self._refused = {**self._of_present_hosts(self._refused), w.host: refused}
            self._record(cmd.Record("preload-refused", f"{w.host}: {refused}", host=w.host))

    def _register(self, w: WorkerId, engine: str = "") -> None:
        self._workers.register(w)
        self._engines.register(w, engine)

    def adopt_worker(self, report: worker_messages.WorkerReport) -> None:
        """Register a worker that the previous driver has started, and take its progress."""
        if report.is_ready:
            self._register(report.worker, report.engine)
        if report.commit:
            self._telemetry.steps[report.worker] = report.commit
            self._telemetry.add_commit(report.commit, self._clock.now())
        if report.rank == 0 and report.holds_state:
            for commit, values in report.reports:
                self._add_report(report.worker, commit, values)

    def _handle_late_report(self, report: worker_messages.WorkerReport) -> None:
        """Handle the report of a worker that did not report during the takeover, or that has just started."""
        cluster = self._cluster()
        if report.worker not in cluster.workers:
            return
        if is_too_late(cluster, report):
            self._post(ev.WorkerFrozen(report.worker, TOO_LATE))
        else:
            self.adopt_worker(report)

    def _handle_progress(self, message: worker_messages.WorkerProgress) -> None:
        telemetry, cluster, now = self._telemetry, self._cluster(), self._clock.now()
        if message.worker not in cluster.workers or 0 < message.generation <= telemetry.last_generation:
            return  # the worker is lost, or the message belongs to the previous job
        received_at = self._clock.machine_time(now)
        if message.commit:  # a newcomer has made none yet
            telemetry.steps[message.worker] = message.commit
        self._stall_detector.note_commits(message.generation, message.commit, self._clock.awake())
        telemetry.add_commit(message.commit, now)
        is_rank_0 = bool(cluster.members) and message.worker == cluster.members[0]
        if message.copies is not None and message.generation == cluster.generation:
            if cluster.has_world:
                telemetry.add_world(message.generation, cluster.members)
            telemetry.add_copies(message.worker, message.generation, message.copies, received_at, is_rank_0=is_rank_0)
        if message.checkpoint is not None and is_rank_0:
            telemetry.add_checkpoint(message.checkpoint, received_at)
        if message.replica is not None and message.replica.generation == cluster.generation:
            self._compare(message.worker, message.replica)
        if message.own is not None and message.own.generation == cluster.generation:
            self._compare_speed(message.worker, message.own, now)
        if is_rank_0:
            self._add_report(message.worker, message.commit, message.report)
            telemetry.measure_speed(self._clock.awake(), message.commit)
        if message.first is not None:
            self._note_recovery(message)
        if message.first is not None and message.generation == cluster.generation:
            self._event_log.note_first_step(message, now, cluster.size)
        if message.commit and message.generation == cluster.generation:
            self._event_log.lost_steps.note_commit(message.commit)
        self._publish_soon()
        self._snapshot_writer.save_telemetry(telemetry, now)

    def _note_recovery(self, message: worker_messages.WorkerProgress) -> None:
        """Record from which commit a sharded model continues, as rank 0 of that world says. The next world may form already."""
        continued = message.copies.continued if message.copies is not None else None
        if continued is not None and continued.rank == 0:
            text = self._telemetry.continued_text(continued)
            self._record(cmd.Record("state-recovered", text, generation=message.generation))

    def _compare(self, w: WorkerId, hashes: ReplicaHashes) -> None:
        """Compare the state of this rank with the others'. The core decides about a rank that differs."""
        cluster = self._cluster()
        if not cluster.has_world or w not in cluster.member_set:
            return
        for found in self._telemetry.replicas.add(w, len(cluster.members), hashes):
            if isinstance(found, AllDiffer):
                text = f"the ranks hold different values at commit {found.commit}, and none can be named: {NOT_ALIKE}"
                self._record(cmd.Record("replicas-differ", text, generation=cluster.generation))
                continue
            for differing in found.workers:
                event = pev.ReplicaDiffered(differing, cluster.generation, found.commit, found.were_equal)
                self._post(event)

    def _compare_speed(self, w: WorkerId, own: OwnTime, now: float) -> None:
        """Compare how long this rank's steps take without waiting for others."""
        cluster = self._cluster()
        if not cluster.has_world or w not in cluster.member_set:
            return
        self._telemetry.step_times.add(w, cluster.members, own.generation, own.own, self._wall(now))
        if text := self._telemetry.slow_ranks.add(w, cluster.members, own, now):
            since = time.strftime("%H:%M", time.localtime(self._wall(self._telemetry.slow_ranks.since(w))))
            text = f"{rank_text(cluster, w)} {text}, since {since}"
            self._record(cmd.Record("rank-slow", text, host=w.host, worker=str(w), generation=cluster.generation))

    def _add_report(self, w: WorkerId, commit: int, values: Mapping[str, float | str | None]) -> None:
        """Take what rank 0 reports. The first value of a name that is not finite is an event: the training has diverged."""
        report, cluster = numbers(values), self._cluster()
        diverged = self._telemetry.add_report(report)
        place = commit, self._wall(self._clock.now()), cluster.generation, len(cluster.members)
        self._telemetry.history.add(place, {name: value for name, value in report.items() if name != "total"})
        for name in diverged:
            text = f"{name} is no longer a finite number: rank 0 reported this at commit {commit}"
            self._record(cmd.Record("not-finite", text, worker=str(w), generation=cluster.generation))
