"""Scripts in the driver: their nodes on the link, and what is sent to them.

Who is in a round is decided in `core.script` and `core.script_rounds`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.reasons import in_words
from nbelastic.core.script_group import places
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.clock import Clock
from nbelastic.driver.faults import Faults
from nbelastic.driver.invitations import Invitations
from nbelastic.driver.parts import Supervised, Transport
from nbelastic.driver.results import Outcome
from nbelastic.driver.run import Run
from nbelastic.driver.script_status import with_script, workers_of
from nbelastic.driver.snapshot import SavedJob
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, messages, node_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import Status
from nbelastic.system import versions
from nbelastic.system.processes import process_table
from nbelastic.transport.keys import Keys


class Scripts:
    """Lives in the driver's thread.

    `decide(event)` has the driver decide on it at once, and `post(event)` puts it into the inbox; `publish()` sends clients
    what has changed.
    """

    def __init__(
        self,
        *,
        cluster: Callable[[], ClusterState],
        settings: Settings,
        clock: Clock,
        server: Transport,
        fleet: Fleet,
        notes: SnapshotWriter,
        faults: Faults,
        keys: Keys,
        decide: Callable[[ev.Event], None],
        post: Callable[[ev.Event], None],
        publish: Callable[[], None],
        supervised: Supervised,
    ) -> None:
        self._cluster, self._settings, self._clock, self._server, self._fleet = cluster, settings, clock, server, fleet
        self._notes, self._faults, self._decide, self._post, self._publish = notes, faults, decide, post, publish
        self._loop = asyncio.get_running_loop()
        self._run: Run | None = None
        self._script = agent_messages.Script("", "")
        self._started = 0
        self._numbers: dict[str, int] = {}  # of the present node of each host of ours
        self._guests: dict[str, str] = {}  # nodes that came by themselves: how they are named on the link
        self._watched: dict[str, int] = {}  # a pidfd for each guest on this machine
        self._orders: dict[str, node_messages.Round] = {}  # of the present round, by host
        self._samples: dict[WorkerId, tuple[float, int]] = {}
        self._silence = supervised("the look at silent guests", self._listen)
        self.invitations = Invitations(settings, fleet, server.address, keys, post)

    def close(self) -> None:
        """The cluster has stopped."""
        self._silence.cancel()
        self.invitations.close()
        for host in list(self._guests):
            self._forget(host)

    # ---- what happens ----

    def begin(self, run: Run, script: agent_messages.Script, terms: sev.Terms, number: int = 0) -> None:
        """Submit a script. `number`: of the last round that another driver has begun, if it was submitted there."""
        self._run, self._script = run, script
        self._orders, self._samples = {}, {}
        self._post(sev.ScriptSubmitted(run.name, script.target, terms, number))

    def begin_again(self, run: Run, job: SavedJob, nodes: Mapping[str, tuple[int, ...]]) -> None:
        """A script of another driver: its hosts' `nodes` are ended, and others start it anew. Guests are asked to come back."""
        assert job.script is not None
        for host, numbers in nodes.items():
            for number in numbers:
                self._started = max(self._started, number)
                self._fleet.to_agent(host, agent_messages.StopNode(number, kill=True))
        self.begin(run, *job.script, job.round + 1)  # what was begun last may not have been written down

    def hear(self, peer: str, message: messages.Message | ev.Event) -> None:
        """A node has said something."""
        match message:
            case messages.WorkerOutput():
                if self._run is not None and (self._is_present(message.worker.host, peer)):
                    self._run.hear(message)
                    self._publish()
                    self._notes.output(replace(message, job=self._run.name))
                return
            case node_messages.NodeHello():
                self._greet(peer, message)
                return
        host: str = message.host  # type: ignore[union-attr]  # all others have one
        if not self._is_present(host, peer):
            if not isinstance(message, sev.NodeLeft):
                self._server.send(peer, node_messages.EndNode(f"this node of {host} was given up"))
            self._server.forget(peer)
            return
        match message:
            case node_messages.NodeSample(round=number, workers=workers):
                ids = (WorkerId(host, rank, number) for rank in range(len(workers)))
                self._samples.update(zip(ids, workers, strict=True))
            case ev.Event():
                self._decide(message)
                if isinstance(message, sev.NodeLeft) and host in self._guests:
                    self._forget(host)

    def launch_ended(self, message: agent_messages.LaunchEnded) -> None:
        """An agent tells of the end of a node's process."""
        if self._numbers.get(message.host) == message.number:
            self._server.forget(f"node/{message.host}~{message.number}")
            del self._numbers[message.host]
            why = f"its node ended ({exit_text(message.code)})"
            if message.code not in (0, sev.UNDONE):
                why += f"; {message.host}-elastic.log in the job's logs says more"
            self._decide(sev.NodeLeft(message.host, why, broken=True))

    def _greet(self, peer: str, hello: node_messages.NodeHello) -> None:
        """A guest has come, from a terminal."""
        problem = versions.difference(hello.versions, versions.here())
        if hello.host in self._cluster().hosts:
            problem = f"a host of the cluster is named {hello.host} already"
        if problem or self._cluster().stopping:
            self._server.send(peer, node_messages.EndNode(problem or "the cluster is closed: it is stopping"))
            self._server.forget(peer)
            return
        if self._faults.decides_not:
            self._server.send(peer, node_messages.Wait(self._faults.decides_not))
            return
        here = hello.machine == process_table()
        if self._guests.get(hello.host) != peer:
            self._forget(hello.host)
            self._guests[hello.host] = peer
            if here:
                self._watch(hello.host, hello.pid)
        self._decide(sev.ExternalNodeJoined(hello.host, hello.pid, here))

    # ---- what is done ----

    def do(self, command: scmd.ScriptCommand) -> None:
        match command:
            case scmd.StartNode(host=host):
                self._started += 1
                self._numbers[host] = self._started
                log_dir = str(self._settings.log_dir / self._script.job)
                self._fleet.to_agent(host, agent_messages.Launch(self._started, log_dir, self._script))
                self._notes.job_goes_on(nodes=dict(self._numbers))
            case scmd.EndNode(host=host, reason=reason, error=error):
                self._send(host, node_messages.EndNode(reason, error))
                if error and host in self._numbers:
                    self._fleet.to_agent(host, agent_messages.StopNode(self._numbers[host]))
            case scmd.ReportWaiting(host=host, reason=reason, full=full):
                nothing = f"no script runs in the cluster {self._settings.name!r} yet"
                self._send(host, node_messages.Wait(in_words(reason, self._clock.now()) if reason else nothing, full))
            case scmd.MoveNode(host=host, address=address, interface=interface):
                self._send(host, messages.Rehome(address, interface))
            case scmd.FormRound():
                self._form(command)
            case scmd.RepeatRound(host=host):
                if host in self._orders:
                    self._send(host, self._orders[host])
            case scmd.LeaveRound(round=number, hosts=hosts, reason=reason):
                for host in hosts:
                    self._send(host, node_messages.LeaveRound(number, reason))
            case scmd.EndScript():
                self._end(command)

    def _form(self, command: scmd.FormRound) -> None:
        by_node = places(command.assignments)
        self._orders, self._samples = {}, {}
        for rank, seat in enumerate(command.assignments):
            order = node_messages.Round(
                command.round, rank, command.assignments, by_node, command.store, command.restarts, self._script.job
            )
            self._orders[seat.host] = order
            self._send(seat.host, order)
        self._notes.job_goes_on(round=command.round)

    def _end(self, command: scmd.EndScript) -> None:
        run = self._run
        assert run is not None
        members = workers_of(command.assignments, command.round)
        culprit = None
        if command.failure is not None:
            culprit = WorkerId(command.host, command.failure.local_rank, command.round)
            run.outcomes[culprit] = Outcome(command.failure.error, command.failure.traceback)
        end = cmd.EndJob(run.name, command.outcome, command.reason, members, culprit)
        run.end(end)
        self._notes.job_goes_on(over=end)
        self._orders = {}

    def _send(self, host: str, message: messages.Message) -> None:
        peer = self._peer(host)
        if peer:
            self._server.send(peer, message)

    def _peer(self, host: str) -> str:
        return self._guests.get(host) or (f"node/{host}~{self._numbers[host]}" if host in self._numbers else "")

    def _is_present(self, host: str, peer: str) -> bool:
        return peer == self._peer(host)

    def rehome(self, host: str, move: messages.Rehome) -> None:
        """The host's node offers its stores elsewhere from now on."""
        if host in self._numbers:
            self._server.send(f"node/{host}~{self._numbers[host]}", move)

    # ---- guests that vanish ----

    def _watch(self, host: str, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        self._watched[host] = fd
        self._loop.add_reader(fd, self._vanished, host, "its process has ended")

    def _vanished(self, host: str, why: str) -> None:
        self._decide(sev.NodeLeft(host, why, broken=True))
        self._forget(host)

    def _forget(self, host: str) -> None:
        peer = self._guests.pop(host, None)
        if peer is not None:
            self._server.forget(peer)
        fd = self._watched.pop(host, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            with suppress(OSError):
                os.close(fd)

    async def _listen(self) -> None:
        """For ever: guests that are not heard are lost."""
        settings, clock = self._settings, self._clock
        while True:
            await asyncio.sleep(settings.heartbeat)
            for host, peer in list(self._guests.items()):
                heard_at = self._server.heard_at.get(peer)
                quiet = clock.silence(heard_at) if heard_at is not None else 0.0
                if quiet > settings.silence:
                    self._vanished(host, f"nothing heard of it for {quiet:.0f} s")

    # ---- those who look on ----

    def shown(self, status: Status, now: float) -> Status:
        """`status` at `now` with the script in it, if that is the present or last job."""
        cluster, folder = self._cluster(), str(self._settings.log_dir)
        return with_script(status, cluster.script, cluster.external_nodes, now, samples=self._samples, log_dir=folder)
