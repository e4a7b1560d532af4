"""What agents, workers and nodes say over the link, and what the driver makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.arrivals import Arrivals
from nbelastic.driver.clock import Clock
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.jobs import Jobs
from nbelastic.driver.liveness import Commits
from nbelastic.driver.parts import Transport
from nbelastic.driver.scripts import Scripts
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.driver.telemetry import numbers
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import versions


class Inbound:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log; `publish(soon=, news=)` sends clients
    what has changed. `arrivals`: who is heard while this driver takes a cluster over; None: it does not, or has.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        clock: Clock,
        server: Transport,
        fleet: Fleet,
        jobs: Jobs,
        scripts: Scripts,
        notes: SnapshotWriter,
        chronicle: EventLog,
        commits: Commits,
        arrivals: Arrivals | None,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        publish: Callable[[], None],
        publish_soon: Callable[[], None],
    ) -> None:
        self._cluster, self._clock, self._server, self._fleet, self._jobs = cluster, clock, server, fleet, jobs
        self._scripts, self._notes, self._chronicle, self._commits = scripts, notes, chronicle, commits
        self._post, self._record, self._publish, self._publish_soon = post, record, publish, publish_soon
        self.arrivals = arrivals

    def is_known(self, peer: str) -> bool:
        """Whether this agent, worker or node, which is not heard yet, is to be kept in touch with.

        The last words of a dead worker may come after its host's agent has told of its death.
        """
        role, _, name = peer.partition("/")
        if role == "worker":
            try:
                return self.arrivals is not None or WorkerId.parse(name) in self._cluster().workers
            except ValueError:
                return False
        return role == "node" or (role == "agent" and peer == self._fleet.peer_of(name.rpartition("~")[0]))

    def read(self, peer: str, message: messages.Message | ev.Event) -> None:
        """`peer` has sent this. TypeError for what is not known here."""
        if peer.startswith("agent/") and peer != self._fleet.peer_of(peer[6:].rpartition("~")[0]):
            self._server.send(
                peer, agent_messages.StopAgent()
            )  # given up while it was not heard: it comes back from the dead
            self._server.forget(peer)
            return
        if peer.startswith("node/"):
            self._scripts.hear(peer, message)
            return
        match message:
            case agent_messages.LaunchEnded():
                self._scripts.launch_ended(message)
            case agent_messages.AgentHello() | worker_messages.WorkerReport() | ev.WorkerFrozen() if (
                self.arrivals is not None
            ):
                self.arrivals.hear(message)
            case worker_messages.WorkerReport():
                self._late(message)
            case agent_messages.AgentHello():
                problem = versions.difference(message.versions, versions.here())
                here = self._fleet.here_towards(message.host)
                self._post(ev.AgentReady(message.host, message.pid, message.addresses, message.port, problem, here))
            case agent_messages.AgentGoodbye(host=host, reason=reason):
                self._fleet.lose_agent(host, reason)
            case agent_messages.AgentSample():
                self._fleet.live.sample_of(message, self._cluster().workers, self._clock.now())
                self._publish_soon()
            case worker_messages.WorkerHello(worker=w, engine=engine):
                if w in self._cluster().workers:
                    self._fleet.hello(w, engine)
            case worker_messages.WorkerProgress():
                self._progress(message)
            case worker_messages.ProgramResult() | worker_messages.ResultPiece() | worker_messages.FetchCall():
                self._jobs.take(message)
            case messages.WorkerOutput():
                self._jobs.take(message)
                self._publish()
            case worker_messages.CellResult():
                self._fleet.cell_ended(message)
            case worker_messages.StackShown(worker=w):
                if w in self._cluster().workers:
                    self._fleet.live.stacks[w] = message
                    self._publish()
            case ev.Event():
                if isinstance(message, ev.WorkerFormed):
                    self._chronicle.worker_formed(message)
                self._post(message)
            case _:
                raise TypeError(f"{type(message).__name__} from {peer} is no message that the driver knows")

    def find(self, here: worker_messages.WorkerReport) -> None:
        """A worker that another driver has started."""
        if here.engine:
            self._fleet.hello(here.worker, here.engine)
        live = self._fleet.live
        if here.commit:
            live.steps[here.worker] = here.commit
            live.progress(here.commit, self._clock.now())
        if here.rank == 0 and here.holds:
            for commit, report in here.reports:
                self._report(here.worker, commit, report)

    def _late(self, here: worker_messages.WorkerReport) -> None:
        """It was not heard when this driver took over; or it has just started, and has nothing to tell yet."""
        cluster = self._cluster()
        if here.worker not in cluster.workers:
            return
        is_in = here.formed and here.generation == cluster.generation and here.worker in cluster.members
        if here.busy and (not is_in or here.bound or here.word is not None):
            self._post(ev.WorkerFrozen(here.worker, "it answered a new driver too late"))
        else:
            self.find(here)

    def _progress(self, message: worker_messages.WorkerProgress) -> None:
        live, cluster, now = self._fleet.live, self._cluster(), self._clock.now()
        if message.worker not in cluster.workers or 0 < message.generation <= live.last_generation:
            return  # it is dead, or speaks of the job before
        if message.commit:  # who has just come has made none yet
            live.steps[message.worker] = message.commit
        self._commits.made(message.generation, message.commit, now)
        live.progress(message.commit, now)
        if cluster.members and message.worker == cluster.members[0]:
            self._report(message.worker, message.commit, message.report)
            live.steps_per_second = self._fleet.pace.rate(now, message.commit)
        if message.first is not None and message.generation == cluster.generation:
            self._chronicle.first_step(message, now, cluster.size)
        self._publish_soon()
        self._notes.live(now)

    def _report(self, w: WorkerId, commit: int, report: Mapping[str, float | str | None]) -> None:
        """Take what rank 0 reports. The first value of a name that is not finite is an event: the training has diverged."""
        for name in self._fleet.live.report_of(numbers(report)):
            text = f"{name} is not a finite number any more: rank 0 reported so at commit {commit}"
            self._record(cmd.Record("not-finite", text, worker=str(w), generation=self._cluster().generation))
