"""Scripts in the driver: the one `Group`, its nodes on the link, and what people see of them.

Hosts, and which of them are up, are the world's affair; who is in a round is `core.rounds`'s. Here it is carried out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from nbelastic import versions
from nbelastic.core import messages as m
from nbelastic.core import networks, wire
from nbelastic.core import script_messages as s
from nbelastic.core.addresses import address_of, is_loopback
from nbelastic.core.errors import UsageError
from nbelastic.core.group import Group, Stage, Terms, places
from nbelastic.core.membership import exit_text
from nbelastic.core.rounds import advance, deadline
from nbelastic.core.world import NEVER, HostPhase
from nbelastic.driver.faults import try_each
from nbelastic.driver.invitations import Invitations
from nbelastic.driver.orders import Order
from nbelastic.driver.parts import Transport
from nbelastic.driver.results import Outcome
from nbelastic.driver.run import Run
from nbelastic.driver.saved import SavedJob
from nbelastic.driver.script_status import with_script, workers_of
from nbelastic.driver.status import Status
from nbelastic.link import Keys, machine

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver


class Scripts:
    """Lives in the driver's thread."""

    def __init__(self, driver: Driver, hub: Transport, keys: Keys) -> None:
        self._driver, self._hub = driver, hub
        self._loop = asyncio.get_running_loop()
        self._group: Group | None = None
        self._run: Run | None = None
        self._script = wire.Script("", "")
        self._seen: s.HostsSeen | None = None
        self._started = 0
        self._numbers: dict[str, int] = {}  # of the present node of each host of ours
        self._guests: dict[str, str] = {}  # nodes that came by themselves: how they are named on the link
        self._watched: dict[str, int] = {}  # a pidfd for each guest on this machine
        self._waiting: dict[str, s.NodeReady] = {}  # guests for whom there is no script yet
        self._orders: dict[str, wire.Round] = {}  # of the present round, by host
        self._samples: dict[m.WorkerId, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._silence = driver.supervised("the look at silent guests", self._listen)
        self.invitations = Invitations(driver.settings, driver.fleet, hub.address, keys, driver.take_in)

    def close(self) -> None:
        """The cluster has stopped: guests are told."""
        self._silence.cancel()
        self.invitations.close()
        if self._timer is not None:
            self._timer.cancel()
        for host in list(self._guests):
            self._forget(host)

    @property
    def active(self) -> Group | None:
        """The script that still has to run, if any."""
        return self._group if self._group is not None and self._group.stage is not Stage.ENDED else None

    @property
    def guests(self) -> list[str]:
        """The hosts that have come by themselves, from terminals."""
        return list(self._guests)

    # ---- what happens ----

    def submit(self, run: Run, script: wire.Script, terms: Terms) -> None:
        """A new script. There is no other, and no job."""
        if self._driver.notes is not None:
            self._driver.notes.submit(SavedJob(run.name, script=(script, terms)), self._driver)
        self._driver.submitted += 1
        self._driver.fleet.begin_job(run.name, self._driver.world.numbered)
        self._begin(run, script, Group(run.name, terms), "was submitted")

    def begin_again(self, run: Run, job: SavedJob, nodes: Mapping[str, tuple[int, ...]]) -> None:
        """A script of another driver: its hosts' `nodes` are ended, and others start it anew. Guests are asked to come back."""
        assert job.script is not None
        script, terms = job.script
        for host, numbers in nodes.items():
            for number in numbers:
                self._started = max(self._started, number)
                self._driver.fleet.to_agent(host, wire.Recall(number, kill=True))
        # what was begun last may not have been written down
        self._begin(run, script, Group(run.name, terms, round=job.round + 1), "begins again, as its driver was lost")

    def _begin(self, run: Run, script: wire.Script, group: Group, how: str) -> None:
        self._driver.add_run(run)
        self._run, self._script, self._seen = run, script, None
        self._orders, self._samples = {}, {}
        self._group = group
        self._driver.record(m.Record("job-started", f"{run.name} {how}: {script.target}"))
        now = self._driver.clock.now()
        self._look_at_hosts(now)
        for ready in list(self._waiting.values()):
            self._ready(ready, now)
        self._driver.look()

    def observe(self, event: m.Event, now: float) -> None:
        """After the world has taken `event` in."""
        world = self._driver.world
        if world.stopping:
            for host in list(self._guests):
                self._send(host, wire.Dismiss(f"the cluster {self._driver.settings.name!r} was stopped: it is closed"))
        if self.active is None:
            return
        if world.stopping:
            self._advance(s.ScriptStopped(f"the cluster was stopped: {world.stopping}"), now)
        elif isinstance(event, m.JobStopRequested) and event.job == self.active.job:
            self._advance(s.ScriptStopped(event.reason), now)
        elif isinstance(event, m.HostRemoved) and event.name in self._guests:
            self._send(event.name, wire.Dismiss(f"removed by {event.by}", error=False))
        else:
            self._look_at_homes(now)
            self._look_at_hosts(now)

    def _look_at_homes(self, now: float) -> None:
        """What a node has offered where it no longer is, is not used. It hears of the move, and offers again."""
        for host, node in list(self.active.nodes.items()) if self.active is not None else []:
            if node.ready and self._misplaced(host, node.store, guest=node.guest) is not None:
                self._advance(s.NodeMoved(host), now)

    def _misplaced(self, host: str, store: str, *, guest: bool) -> wire.Rehome | None:
        """Where this node's stores have to be, if that is not where this one is."""
        world, at = self._driver.world, address_of(store)
        if guest:  # one of this machine offers what only this machine reaches, until there are others
            here = self._driver.fleet.here or world.door
            moves = host in self._watched and is_loopback(at) and not is_loopback(here) and networks.wide(world)
            return wire.Rehome(here, "") if moves and here else None
        home = world.hosts.get(host)
        if home is None or home.address in ("", at):
            return None
        interface = next((i.name for i in home.addresses if i.address == home.address), "")
        return wire.Rehome(home.address, interface)

    def _look_at_hosts(self, now: float) -> None:
        world = self._driver.world
        up = (host for host in world.hosts.values() if host.phase is HostPhase.UP)
        found = tuple((host.spec.name, host.spec.slots) for host in sorted(up, key=lambda host: host.joined))
        nodes = self._group.nodes if self._group is not None else ()
        ill = (HostPhase.LOST, HostPhase.STARTING)
        lost = tuple(name for name in nodes if name in world.hosts and world.hosts[name].phase in ill)
        seen = s.HostsSeen(found, world.limits.min, world.limits.max, lost)
        if seen != self._seen:
            self._seen = seen
            self._advance(seen, now)

    def hear(self, peer: str, message: wire.Message | m.Event, now: float) -> None:
        """A node has said something."""
        match message:
            case wire.WorkerOutput():
                if self._run is not None and (self._is_present(message.worker.host, peer)):
                    self._run.hear(message)
                    self._driver.tell()
                    if self._driver.notes is not None:
                        self._driver.notes.output(replace(message, job=self._run.name))
                return
            case wire.NodeHello():
                self._greet(peer, message)
                return
        host: str = message.host  # type: ignore[union-attr]  # all others have one
        if not self._is_present(host, peer):
            if not isinstance(message, s.NodeLeft):
                self._hub.send(peer, wire.Dismiss(f"this node of {host} was given up"))
            self._hub.forget(peer)
            return
        match message:
            case wire.NodeSample(round=number, workers=workers):
                ids = (m.WorkerId(host, rank, number) for rank in range(len(workers)))
                self._samples.update(zip(ids, workers, strict=True))
            case s.NodeReady():
                self._ready(message, now)
            case s.NodeLeft():
                self._advance(message, now)
                if host in self._guests:
                    self._forget(host)
            case m.Event():
                self._advance(message, now)

    def launch_ended(self, message: wire.LaunchEnded, now: float) -> None:
        """An agent tells of the end of a node's process."""
        if self._numbers.get(message.host) == message.number:
            self._hub.forget(self._peer(message.host))
            del self._numbers[message.host]
            why = f"its node ended ({exit_text(message.code)})"
            if message.code not in (0, s.UNDONE):
                why += f"; {message.host}-elastic.log in the job's logs says more"
            self._advance(s.NodeLeft(message.host, why, broken=True), now)

    def _greet(self, peer: str, hello: wire.NodeHello) -> None:
        """A guest has come, from a terminal."""
        problem = versions.difference(hello.versions, versions.here())
        if hello.host in self._driver.world.hosts:
            problem = f"a host of the cluster is named {hello.host} already"
        if problem or self._driver.world.stopping:
            self._hub.send(peer, wire.Dismiss(problem or "the cluster is closed: it is stopping"))
            self._hub.forget(peer)
            return
        if self._guests.get(hello.host) != peer:
            self._forget(hello.host)
            self._guests[hello.host] = peer
            if hello.machine == machine():
                self._watch(hello.host, hello.pid)
            self._driver.record(m.Record("host-up", f"{hello.host} has come from a terminal", host=hello.host))
        self._hub.send(peer, wire.Wait(self._why_not()))

    def _why_not(self) -> str:
        name = self._driver.settings.name
        return self.active.reason if self.active is not None else f"no script runs in the cluster {name!r} yet"

    def _ready(self, ready: s.NodeReady, now: float) -> None:
        host = ready.host
        if ready.guest:
            self._waiting[host] = ready
        move = self._misplaced(host, ready.store, guest=ready.guest)
        if move is not None:
            self._send(host, move)
            return
        group = self.active
        if group is None or (ready.guest and ready.job not in ("", group.job)):
            if not ready.guest:
                self._send(host, wire.Dismiss("its script has ended"))
            else:
                self._send(host, wire.Wait(self._why_not()))
            return
        self._advance(ready, now)
        order, group = self._orders.get(host), self.active
        if group is None:
            return
        if order is not None and ready.round < order.round == group.round and group.stage is Stage.RUNNING:
            self._send(host, order)  # again: it may not have heard it
        elif ready.guest and host in group.nodes and group.nodes[host].ready:
            room = group.max is None or group.size + ready.workers <= group.max
            full = group.stage is Stage.RUNNING and not room
            reason = f"the cluster is full: {group.size} of max {group.max} workers" if full else group.reason
            self._send(host, wire.Wait(reason, full))

    def _advance(self, event: m.Event, now: float) -> None:
        if self._group is None or self._driver.faults.decides_not:
            return
        try:
            self._group, commands = advance(self._group, event, now)
        except Exception as error:  # noqa: BLE001  (a bug of ours: what trains must go on)
            self._driver.stop_deciding(event, error)
            return
        note = partial(self._driver.chronicle.note_script, event, now)
        failed = try_each([note, *(partial(self._do, command) for command in commands)])
        if failed is not None:
            self._driver.stop_deciding(event, failed)
            return
        self._schedule(now)
        self._driver.save()
        self._driver.look()

    def _schedule(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = deadline(self._group) if self._group is not None else NEVER
        if at != NEVER:
            self._timer = self._loop.call_later(max(0.0, at - now), self._pass)

    def _pass(self) -> None:
        self._advance(s.Passed(), self._driver.clock.now())

    # ---- what is done ----

    def _do(self, command: m.Command) -> None:
        match command:
            case s.StartNode(host=host):
                self._started += 1
                self._numbers[host] = self._started
                log_dir = str(self._driver.settings.log_dir / self._script.job)
                self._driver.fleet.to_agent(host, wire.Launch(self._started, log_dir, self._script))
                if self._driver.notes is not None:
                    self._driver.notes.job_goes_on(nodes=dict(self._numbers))
            case s.EndNode(host=host, reason=reason, error=error):
                self._send(host, wire.Dismiss(reason, error))
                if error and host in self._numbers:
                    self._driver.fleet.to_agent(host, wire.Recall(self._numbers[host]))
            case s.FormRound():
                self._form(command)
            case s.LeaveRound(round=number, hosts=hosts, reason=reason):
                for host in hosts:
                    self._send(host, wire.LeaveRound(number, reason))
            case s.EndScript():
                self._end(command)
            case m.Record():
                self._driver.record(command)
            case _:
                raise TypeError(f"{type(command).__name__} is no command of a script")

    def _form(self, command: s.FormRound) -> None:
        by_node = places(command.seats)
        self._orders, self._samples = {}, {}
        for rank, seat in enumerate(command.seats):
            self._waiting.pop(seat.host, None)
            order = wire.Round(
                command.round, rank, command.seats, by_node, command.store, command.restarts, self._script.job
            )
            self._orders[seat.host] = order
            self._send(seat.host, order)
        if self._driver.notes is not None:
            self._driver.notes.job_goes_on(round=command.round)

    def _end(self, command: s.EndScript) -> None:
        run, group = self._run, self._group
        assert run is not None
        assert group is not None
        members = workers_of(command.seats, group.round)
        culprit = None
        if command.failure is not None:
            culprit = m.WorkerId(command.host, command.failure.local_rank, group.round)
            run.outcomes[culprit] = Outcome(command.failure.error, command.failure.traceback)
        end = m.EndJob(run.name, command.outcome, command.reason, members, culprit)
        run.end(end)
        if self._driver.notes is not None:
            self._driver.notes.job_goes_on(over=end)
        self._orders = {}

    def _send(self, host: str, message: wire.Message) -> None:
        peer = self._peer(host)
        if peer:
            self._hub.send(peer, message)

    def _peer(self, host: str) -> str:
        return self._guests.get(host) or (f"node/{host}~{self._numbers[host]}" if host in self._numbers else "")

    def _is_present(self, host: str, peer: str) -> bool:
        return peer == self._peer(host)

    def rehome(self, host: str, move: wire.Rehome) -> None:
        """The host's nodes offer their stores elsewhere from now on."""
        if host in self._numbers:
            self._send(host, move)

    def order(self, message: Mapping[str, Any], by: str) -> Order | None:
        """The order that a button's message is, if it concerns a script or a guest. UsageError for what cannot be."""
        group = self.active
        match dict(message):
            case {"order": "remove_host", "host": str(host)} if host in self._guests:
                gone = "it has left"
                return Order(
                    f"remove {host}",
                    m.HostRemoved(host, by=by),
                    lambda driver: None if host in driver.scripts.guests else gone,
                )
            case {"order": "stop_job"} if group is not None:
                ended = f"{group.job} has ended"
                return Order(
                    f"stop {group.job}",
                    m.JobStopRequested(group.job, f"stopped by {by}"),
                    lambda driver: None if driver.scripts.active is not None else ended,
                )
            case {"order": "restart"}:
                self.refuse_to_restart()
        return None

    def refuse_to_restart(self) -> None:
        """UsageError while a script runs."""
        if self.active is not None:
            raise UsageError(f"{self.active.job} is a script: its workers only begin again together.")

    # ---- guests that vanish ----

    def _watch(self, host: str, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        self._watched[host] = fd
        self._loop.add_reader(fd, self._vanished, host, "its process has ended")

    def _vanished(self, host: str, why: str) -> None:
        self._advance(s.NodeLeft(host, why, broken=True), self._driver.clock.now())
        self._forget(host)

    def _forget(self, host: str) -> None:
        peer = self._guests.pop(host, None)
        self._waiting.pop(host, None)
        if peer is not None:
            self._hub.forget(peer)
        fd = self._watched.pop(host, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            with suppress(OSError):
                os.close(fd)

    async def _listen(self) -> None:
        """For ever: guests that are not heard are lost."""
        settings, clock = self._driver.settings, self._driver.clock
        while True:
            await asyncio.sleep(settings.heartbeat)
            for host, peer in list(self._guests.items()):
                heard_at = self._hub.heard_at.get(peer)
                quiet = clock.silence(heard_at) if heard_at is not None else 0.0
                if quiet > settings.silence:
                    self._vanished(host, f"nothing heard of it for {quiet:.0f} s")

    # ---- those who look on ----

    def shown(self, status: Status) -> Status:
        """`status` with the script in it, if that is the present or last job."""
        waiting = {host: ready.workers for host, ready in list(self._waiting.items())}
        folder = str(self._driver.settings.log_dir)
        return with_script(status, self._group, list(self._guests), waiting, samples=self._samples, log_dir=folder)
