"""Scripts in the driver: receives the messages of their nodes, and sends them commands.

`core.script` and `core.script_rounds` decide which nodes are in a round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.reasons import in_words
from nbelastic.core.script_group import ranks_by_node
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.clock import Clock
from nbelastic.driver.connection_files import ConnectionFiles
from nbelastic.driver.dependencies import MessageServer, StartTask
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.internal_errors import InternalErrors
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.results import Outcome
from nbelastic.driver.script_status import with_script, workers_of
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, messages, node_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import UNSUCCESSFUL_NODE, exit_text
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system import versions
from nbelastic.system.process_identity import identity
from nbelastic.system.processes import pid_namespace
from nbelastic.transport.backlog import read_turn
from nbelastic.transport.keys import Keys


class Scripts:
    """Lives in the driver's thread.

    `decide(event)` has the driver decide on the event at once, `post(event)` puts it into the inbox, and `publish()` sends
    clients what has changed.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        settings: Settings,
        clock: Clock,
        server: MessageServer,
        agents: Agents,
        snapshot_writer: SnapshotWriter,
        internal_errors: InternalErrors,
        keys: Keys,
        decide: Callable[[ev.Event], None],
        post: Callable[[ev.Event], None],
        publish: Callable[[], None],
        start_task: StartTask,
    ) -> None:
        self._cluster, self._settings, self._clock, self._server, self._agents = (
            cluster,
            settings,
            clock,
            server,
            agents,
        )
        self._snapshot_writer, self._internal_errors = snapshot_writer, internal_errors
        self._decide, self._post, self._publish = decide, post, publish
        self._loop = asyncio.get_running_loop()
        self._run: JobRun | None = None
        self._script = agent_messages.Script("", "")
        self._started_nodes = 0
        self._node_numbers: dict[str, int] = {}  # of the present node of each host with an agent
        self._external_nodes: dict[str, str] = {}  # peers of external nodes by host
        self._pidfds: dict[str, int] = {}  # of external nodes on this machine, by host
        self._rounds: dict[str, node_messages.Round] = {}  # the newest message about the present round to each host
        self._samples: dict[WorkerId, tuple[float, int]] = {}
        self._watch_task = start_task("the check for silent nodes", self._watch_nodes)
        self.connection_files = ConnectionFiles(settings, agents, server.address, keys, post)

    def close(self) -> None:
        """The cluster has stopped."""
        self._watch_task.cancel()
        self.connection_files.close()
        for host in list(self._external_nodes):
            self._forget_external_node(host)

    # ---- requests and messages ----

    def submit(self, run: JobRun, script: agent_messages.Script, terms: sev.Terms, number: int = 0) -> None:
        """Submit a script. `number`: of its last round, if the previous driver has run it."""
        self._run, self._script = run, script
        self._rounds, self._samples = {}, {}
        self._post(sev.ScriptSubmitted(run.name, script.target, terms, number))

    def skip_numbers(self, agents: Iterable[agent_messages.AgentHello]) -> None:
        """Give no new node the number of one that an agent knows: its end, which agents report by number, would be taken for the new one's."""
        self._started_nodes = max((number for agent in agents for number in (*agent.nodes, *agent.ended)), default=0)

    def restart(self, run: JobRun, job: SavedJob, nodes: Mapping[str, tuple[int, ...]]) -> None:
        """Submit a script of the previous driver again, and kill its `nodes`, by host, but those that end their workers already.

        External nodes have left its round.
        """
        assert job.script is not None
        for host, numbers in nodes.items():
            for number in numbers if host not in self._cluster().ending_nodes else ():
                self._agents.send(host, agent_messages.StopNode(number, kill=True))
        self.submit(run, *job.script, job.round + 1)  # the last round may have begun without being saved

    def receive(self, peer: str, message: messages.Message | ev.Event) -> None:
        """Handle a node's message."""
        match message:
            case messages.WorkerOutput():
                if self._run is not None and self._is_present(message.worker.host, peer):
                    self._run.add_output(message)
                    self._publish()
                    self._snapshot_writer.append_output(replace(message, job=self._run.name))
                return
            case node_messages.NodeHello():
                self._admit_external_node(peer, message)
                return
        host: str = message.host  # type: ignore[union-attr]  # all others have one
        if not self._is_present(host, peer):
            if not isinstance(message, sev.NodeLeft):
                self._server.send(peer, node_messages.EndNode(f"the driver has given up this node of {host}"))
            self._server.forget(peer)
            return
        match message:
            case node_messages.NodeSample(round=number, workers=workers):
                ids = (WorkerId(host, rank, number) for rank in range(len(workers)))
                self._samples.update(zip(ids, workers, strict=True))
            case ev.Event():
                self._decide(message)
                if isinstance(message, sev.NodeLeft) and host in self._external_nodes:
                    self._forget_external_node(host)

    def on_node_exited(self, message: agent_messages.NodeExited) -> None:
        """An agent has reported the end of a node's process."""
        if message.host in self._cluster().ending_nodes and message.host not in self._node_numbers:
            self._decide(sev.NodeLeft(message.host, "the node of the previous driver has ended"))
        elif self._node_numbers.get(message.host) == message.number:
            self._forget_node(message.host)
            why = f"its node ended ({exit_text(message.code)})"
            if message.code not in (0, UNSUCCESSFUL_NODE):
                why += f"; {message.host}-elastic.log in the job's logs says more"
            self._decide(sev.NodeLeft(message.host, why, broken=True))

    def _admit_external_node(self, peer: str, hello: node_messages.NodeHello) -> None:
        """An external node has connected: end it, let it wait, or post that it has joined."""
        problem = versions.difference(hello.versions, versions.installed())
        if hello.host in self._cluster().hosts:
            problem = f"a host of the cluster is named {hello.host} already"
        if problem or self._cluster().stopping:
            self._server.send(peer, node_messages.EndNode(problem or "the cluster is closed: it is stopping"))
            self._server.forget(peer)
            return
        if self._internal_errors.decision_failure:
            self._server.send(peer, node_messages.Wait(self._internal_errors.decision_failure))
            return
        is_local = hello.machine == pid_namespace()
        if self._external_nodes.get(hello.host) != peer:
            self._forget_external_node(hello.host)
            self._external_nodes[hello.host] = peer
            if is_local:
                self._watch_process(hello.host, hello.pid)
        self._decide(sev.ExternalNodeJoined(hello.host, hello.pid, is_local))

    # ---- commands of the core ----

    def execute(self, command: scmd.ScriptCommand) -> None:
        """Carry out a command of the core."""
        match command:
            case scmd.StartNode(host=host):
                self._forget_node(host)
                self._started_nodes += 1
                self._node_numbers[host] = self._started_nodes
                log_dir = str(self._settings.log_dir / self._script.job)
                self._agents.send(host, agent_messages.StartNode(self._started_nodes, log_dir, self._script))
            case scmd.EndNode(host=host, reason=reason, error=error):
                self._send(host, node_messages.EndNode(reason, error))
                if error and host in self._node_numbers:
                    self._agents.send(host, agent_messages.StopNode(self._node_numbers[host]))
            case scmd.ReportWaiting(host=host, reason=reason, full=full):
                no_script = f"no script runs in the cluster {self._settings.name!r} yet"
                self._send(host, node_messages.Wait(in_words(reason, self._clock.now()) if reason else no_script, full))
            case scmd.MoveNode(host=host, address=address, interface=interface):
                self._send(host, messages.Rehome(address, interface))
            case scmd.FormRound():
                self._form_round(command)
            case scmd.RepeatRound(host=host):
                if host in self._rounds:
                    self._send(host, self._rounds[host])
            case scmd.LeaveRound(round=number, hosts=hosts, reason=reason):
                for host in hosts:
                    self._send(host, node_messages.LeaveRound(number, reason))
            case scmd.EndScript():
                self._end_script(command)

    def _form_round(self, command: scmd.FormRound) -> None:
        by_node = ranks_by_node(command.assignments)
        self._rounds, self._samples = {}, {}
        for rank, assignment in enumerate(command.assignments):
            message = node_messages.Round(
                command.round, rank, command.assignments, by_node, command.store, command.restarts, self._script.job
            )
            self._rounds[assignment.host] = message
            self._send(assignment.host, message)
        for host in [host for host in self._node_numbers if not self._agents.has_agent(host)]:
            self._forget_node(host)
        nodes = {host: self._node_numbers[host] for host in self._rounds if host in self._node_numbers}
        others = self._cluster().external_nodes
        external = {
            host: identity(others[host].pid) if others[host].is_local else "" for host in self._rounds if host in others
        }
        self._snapshot_writer.update_job(round=command.round, nodes=nodes, external=external)

    def _end_script(self, command: scmd.EndScript) -> None:
        run = self._run
        assert run is not None
        members = workers_of(command.assignments, command.round)
        culprit = None
        if command.failure is not None:
            culprit = WorkerId(command.host, command.failure.local_rank, command.round)
            run.outcomes[culprit] = Outcome(command.failure.error, command.failure.traceback)
        end = cmd.EndJob(run.name, command.outcome, command.reason, members, culprit)
        run.end(end)
        self._snapshot_writer.update_job(over=end)
        self._rounds = {}

    def _forget_node(self, host: str) -> None:
        """The host's node has ended, or was lost with its agent."""
        number = self._node_numbers.pop(host, None)
        if number is not None:
            self._server.forget(f"node/{host}~{number}")

    def _send(self, host: str, message: messages.Message) -> None:
        peer = self._peer(host)
        if peer:
            self._server.send(peer, message)

    def _peer(self, host: str) -> str:
        if host in self._external_nodes:
            return self._external_nodes[host]
        return f"node/{host}~{self._node_numbers[host]}" if host in self._node_numbers else ""

    def _is_present(self, host: str, peer: str) -> bool:
        return peer == self._peer(host)

    def rehome(self, host: str, rehome: messages.Rehome) -> None:
        """Tell the host's node the new address for its stores."""
        if host in self._node_numbers:
            self._server.send(f"node/{host}~{self._node_numbers[host]}", rehome)

    # ---- external nodes ----

    def _watch_process(self, host: str, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        self._pidfds[host] = fd
        self._loop.add_reader(fd, self._lose_external_node, host, "its process has ended")

    def _lose_external_node(self, host: str, reason: str) -> None:
        self._decide(sev.NodeLeft(host, reason, broken=True))
        self._forget_external_node(host)

    def _forget_external_node(self, host: str) -> None:
        peer = self._external_nodes.pop(host, None)
        if peer is not None:
            self._server.forget(peer)
        fd = self._pidfds.pop(host, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            with suppress(OSError):
                os.close(fd)

    async def _watch_nodes(self) -> None:
        """Declare silent external nodes lost, and report which nodes live after a failure, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.heartbeat)
            await read_turn()
            for host, peer in list(self._external_nodes.items()):
                silence = self._silence_of(peer)
                if silence > self._settings.silence:
                    self._lose_external_node(host, f"no message from it for {silence:.0f} s")
            self._report_heard()

    def _report_heard(self) -> None:
        group = self._cluster().active_script
        if group is None or not group.failures:
            return
        age = self._clock.now() - max(at for _, _, at in group.failures)
        since = time.monotonic() - age + self._settings.heartbeat
        hosts = (assignment.host for assignment in group.assignments)
        heard = tuple(host for host in hosts if self._server.heard_at.get(self._peer(host), 0.0) > since)
        if heard != group.heard:
            self._decide(sev.NodesHeard(heard))

    def _silence_of(self, peer: str) -> float:
        """Seconds since the last message of a node; 0 if it has not connected yet."""
        heard_at = self._server.heard_at.get(peer)
        return self._clock.silence(heard_at, self._server.backlog.messages) if heard_at is not None else 0.0

    # ---- status ----

    def add_to_status(self, status: Status, now: float) -> Status:
        """`status` at `now` with the script in it, if the script is the present or last job."""
        cluster, folder = self._cluster(), str(self._settings.log_dir)
        return with_script(status, cluster.script, cluster.external_nodes, now, samples=self._samples, log_dir=folder)
