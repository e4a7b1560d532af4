"""The agents of the hosts: starts, adopts and ends them, and sends them messages."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nbelastic.core import commands as cmd
from nbelastic.driver.agent_config import agent_config
from nbelastic.driver.agent_handle import AgentHandle
from nbelastic.driver.clock import Clock
from nbelastic.driver.dependencies import Dependencies, MessageServer
from nbelastic.driver.drained_nodes import DrainedNodes
from nbelastic.driver.driver_snapshot import DriverSnapshot, SavedAgent
from nbelastic.driver.pod_hosts import announced_ends, returns
from nbelastic.driver.queued_hosts import states_of
from nbelastic.driver.telemetry import Telemetry
from nbelastic.driver.unanswered_hosts import UnansweredHosts
from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import HostDisconnected
from nbelastic.protocol.host_sources import ListedHosts
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import Settings
from nbelastic.provision.launchers import Agent, BatchJobAgent, job_agent, tunnelled_agent
from nbelastic.provision.pods import close_pods
from nbelastic.provision.process_agent import AdoptedAgent
from nbelastic.provision.tcp_proxy import ProxySet
from nbelastic.provision.tunnel_ports import TunnelPorts, ports_file
from nbelastic.system.addresses import bracketed
from nbelastic.system.cpu_count import usable_cpus
from nbelastic.system.folder_paths import remove_batch_folder
from nbelastic.system.terminal_text import printable_line
from nbelastic.transport.keys import Keys

PROXY_CHECK_INTERVAL = 0.5  # seconds
BATCH_JOB_INTERVAL = 2.0  # seconds between two queries of the batch system
STOP_GRACE = 3.0  # seconds between the request to stop and the kill
KILL_TIMEOUT = 1.0  # seconds in which a killed process ends


class Agents:
    """Lives in the driver's thread.

    `post(event)` puts an event into the driver's inbox, `record` adds to the event log, `save` saves the driver snapshot, and
    `changed` publishes the status.
    """

    def __init__(
        self,
        settings: Settings,
        server: MessageServer,
        keys: Keys,
        *,
        clock: Clock,
        telemetry: Telemetry,
        dependencies: Dependencies,
        post: Callable[[ev.Event], None],
        record: Callable[[cmd.Record], None],
        save: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._server, self._keys, self._clock = settings, server, keys, clock
        self._telemetry, self._dependencies = telemetry, dependencies
        self._post, self._record, self._save, self._changed = post, record, save, changed
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, AgentHandle] = {}  # by host
        self._running: set[AgentHandle] = set()  # those with a process on this machine, killed ones included
        self._none_runs = asyncio.Event()
        self._launches: set[asyncio.Task[None]] = set()  # those of killed ones included: `ssh -G` may run
        self._unanswered = UnansweredHosts(settings.lease, settings.heartbeat)
        self.started_count = 0
        self._is_save_scheduled = False
        self.tcp_proxies = ProxySet(
            ports_file(settings.run_folder), settings.driver_lease, self.expected_workers, self._tunnel_ended
        )
        self._tunnel_ports = TunnelPorts(settings.run_folder, keys.client_secret)

    async def stop(self) -> None:
        """End every agent and the TCP proxies. Wait until the processes have ended: a child would be a zombie."""
        for handle in self._handles.values():
            self._note_end(handle)
            handle.kill()
        if (record := self._unanswered.record(self._clock.now())) is not None:
            self._record(record)
        await asyncio.gather(*self._launches, return_exceptions=True)
        if self._running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_runs.wait(), KILL_TIMEOUT)
        self.tcp_proxies.close()
        await close_pods()
        remove_batch_folder(self._settings.name, self._settings.number)

    def adopt(self, saved: DriverSnapshot) -> None:
        """Take over the agents of the previous driver. Events report those that have ended."""
        self.started_count = saved.agents_started
        self.tcp_proxies.adopt(saved.proxies)
        for host, old in saved.agents.items():
            handle = self._handles[host] = AgentHandle(host, old.number)
            handle.driver_address, handle.rehome, handle.returned = old.driver_address, old.rehome, old.returns
            handle.drain_announced, handle.is_adopted = old.drain_announced, True
            handle.slots = next((h.spec.slots for h in saved.cluster.hosts if h.spec.name == host), 0)
            handle.local_slots = 0 if old.driver_address else handle.slots
            on_stop = partial(self._agent_ended, host, handle)
            if old.job and not self._settings.tunnels:
                handle.agent = batch = job_agent(host, self._settings, on_stop, old.number)
                batch.adopt(old.job)
            elif self._settings.tunnels and old.driver_address:
                handle.agent = self._adopt_tunnelled(saved, handle, old.process)
                self._watch_end(handle, old.process)
            else:
                handle.agent = AdoptedAgent(old.process, on_stop)
                handle.agent.start({})
                self._watch_end(handle, old.process)

    def _adopt_tunnelled(self, saved: DriverSnapshot, handle: AgentHandle, process: str) -> Agent:
        """Take over an agent behind a tunnel, which may have ended meanwhile."""
        host = handle.host
        spec = next((h.spec for h in saved.cluster.hosts if h.spec.name == host), HostSpec(host, 1))
        calls = {"on_stop": partial(self._agent_ended, host, handle)}
        calls["on_disconnect"] = partial(self._disconnected, host, handle)
        agent = tunnelled_agent(spec, self._settings, number=handle.number, **calls)
        agent.adopt(process, self._config(spec, "", handle))
        return agent

    def saved(self) -> dict[str, SavedAgent]:
        """The agents that run, for the driver snapshot."""
        saved = {host: handle.saved(self._heard_at(handle)) for host, handle in self._handles.items()}
        return {host: agent for host, agent in saved.items() if agent is not None}

    async def watch_batch_jobs(self) -> None:
        """Show the states of batch jobs whose agents have not connected yet, and announce ends of hosts, until cancelled."""
        nodes = DrainedNodes()
        while True:
            await asyncio.sleep(BATCH_JOB_INTERVAL)
            for event in announced_ends({host: handle.agent for host, handle in self._handles.items()}):
                self._post(event)
            self._save()  # no event reports the number of a submitted batch job, or a new TCP proxy
            await self._announce_drained(nodes)
            shown = self._telemetry.batch_jobs
            self._telemetry.batch_jobs = states = await states_of(
                {host: each.agent for host, each in self._handles.items() if each.peer not in self._server.heard_at}
            )
            if states or shown:  # also unchanged ones: the reasons say for how long they have waited
                self._changed()

    async def _announce_drained(self, nodes: DrainedNodes) -> None:
        """Announce the ends of hosts whose nodes are drained. The decision on the event saves that they were announced."""
        asked = {host: handle for host, handle in self._handles.items() if self.replaces(host)}
        jobs = {
            host: handle.agent.slurm_job
            for host, handle in asked.items()
            if isinstance(handle.agent, BatchJobAgent) and not handle.drain_announced
        }
        for event in await nodes.announced_ends(jobs):
            if self._handles.get(event.name) is asked[event.name]:
                asked[event.name].drain_announced = True
                self._post(event)

    async def watch_tcp_proxies(self) -> None:
        """Replace TCP proxies that have ended or are stopped, until cancelled."""
        while True:
            await asyncio.sleep(PROXY_CHECK_INTERVAL)
            for address in self.tcp_proxies.restart_dead():
                text = f"the TCP proxy at {address} had ended or was stopped; nbelastic started it again"
                self._record(cmd.Record("proxy-started", text))

    def execute(
        self,
        command: cmd.StartAgent | cmd.StopAgent | cmd.CancelEnd | cmd.StartWorker | cmd.StopWorker,
        log_dir: Path,
    ) -> None:
        """Carry out a command of the core. `log_dir`: where a new worker writes its output."""
        match command:
            case cmd.StartAgent(host=spec):
                self._start(spec)
            case cmd.StopAgent(host=host):
                self._stop(host)
            case cmd.CancelEnd(host=host):
                self.send(host, agent_messages.CancelEnd())
            case cmd.StartWorker():
                self.send(command.worker.host, agent_messages.Spawn(command.worker, str(log_dir), command.gpu))
            case cmd.StopWorker(worker=w, kill=kill):
                self.send(w.host, agent_messages.StopWorker(w, kill))

    def send(self, host: str, message: messages.Message) -> None:
        """Send a message to the agent of a host, if it has one."""
        if host in self._handles:
            self._server.send(self._handles[host].peer, message)

    def proxied_address(self, driver_address: str) -> str:
        """The endpoint at `driver_address` through which other machines reach the driver's server."""
        port = self.tcp_proxies.port(driver_address, self._server.address)
        return f"tcp://{bracketed(driver_address)}:{port}"

    def driver_address_for(self, host: str) -> str:
        """The driver's address as the host reaches it; empty if the host is the same machine."""
        return self._handles[host].driver_address if host in self._handles else ""

    def open_ports(self, host: str, ports: Iterable[int], engines: int) -> None:
        """Let `engines` workers of this host connect to these ports of the driver's machine, if it is another machine."""
        if self.driver_address_for(host):
            self._tunnel_ports.open(ports, engines)

    def has_local_agent(self, host: str) -> bool:
        """Whether the host has an agent and is this machine."""
        return host in self._handles and not self._handles[host].driver_address

    def replaces(self, host: str) -> bool:
        """Whether another host takes this one's place when it ends: a batch job, which a discovery would replace itself."""
        handle, listed = self._handles.get(host), isinstance(self._settings.discovery, ListedHosts)
        return listed and handle is not None and isinstance(handle.agent, BatchJobAgent)

    def has_agent(self, host: str) -> bool:
        """Whether the host has an agent, as far as the driver knows."""
        return host in self._handles

    def peer_of(self, host: str) -> str:
        """The host's present agent as a peer of the server; empty if it has none."""
        return self._handles[host].peer if host in self._handles else ""

    def rehome_of(self, host: str) -> messages.Rehome | None:
        """The newest address of the host's workers, if that has changed since its agent started."""
        return self._handles[host].rehome if host in self._handles else None

    def silence_of(self, host: str) -> float:
        """Seconds since the last message of this host's agent; 0 if it has not connected yet."""
        heard_at = self._server.heard_at.get(self.peer_of(host))
        return self._clock.silence(heard_at, self._server.backlog.connections) if heard_at is not None else 0.0

    def unread_seconds(self) -> float:
        """For how long messages may have waited unread, at most."""
        return self._clock.unread_seconds(self._server.backlog.messages)

    def rehome(self, host: str, rehome: messages.Rehome) -> None:
        """Tell the host's agent the new address of its workers, and remember it for workers that register later."""
        if host in self._handles:
            self._handles[host].rehome = rehome
        self.send(host, rehome)

    def _start(self, spec: HostSpec) -> None:
        self.kill(spec.name)
        self.started_count += 1
        handle = self._handles[spec.name] = AgentHandle(spec.name, self.started_count)
        handle.slots = spec.slots
        # This begins after the decision was saved, with the number: a driver that takes over must not use that again.
        handle.launch = launch = self._loop.create_task(self._launch(spec, handle))
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)

    async def _launch(self, spec: HostSpec, handle: AgentHandle) -> None:
        """Locate the host and start its agent there."""
        try:
            local, handle.driver_address = await self._dependencies.locate(spec, self._settings.launcher)
            config = self._config(spec, local, handle)
            if local:
                handle.local_slots = spec.slots  # all local hosts share this machine's cores
                slots = sum(each.local_slots for each in self._handles.values())
                config["threads"] = str(max(1, usable_cpus() // slots))
            else:
                self._tunnel_ports.open([int(self._server.address.rpartition(":")[2])])
                if not self._settings.tunnels:
                    port = self.tcp_proxies.port(handle.driver_address, self._server.address)
                    config["dial"] = (handle.driver_address, port)
            on_stop = partial(self._agent_ended, spec.name, handle)
            on_disconnect = partial(self._disconnected, spec.name, handle)
            agent = self._dependencies.agent_for(
                spec, local, self._settings, number=handle.number, on_stop=on_stop, on_disconnect=on_disconnect
            )
            agent.start(config)
        except Exception as error:  # noqa: BLE001  (no ssh here, or any error of a launcher: the host shows it)
            handle.launch = None
            self._agent_ended(spec.name, handle, f"its agent cannot be started: {error}")
            return
        handle.agent, handle.launch = agent, None
        self._watch_end(handle, agent.process)
        self._save_soon()  # the agent's process outlives this driver

    def _save_soon(self) -> None:
        """Save once for all agents that start in the same turn of the event loop."""
        if not self._is_save_scheduled:
            self._is_save_scheduled = True
            self._loop.call_soon(self._save_now)

    def _save_now(self) -> None:
        self._is_save_scheduled = False
        self._save()

    def _config(self, spec: HostSpec, local: str, handle: AgentHandle) -> dict[str, Any]:
        address, keys = self._server.address, self._keys
        return agent_config(spec, handle, local, settings=self._settings, server=address, keys=keys)

    def expected_workers(self) -> int:
        """How many workers may run: as many as there are slots, or the limit if that is lower."""
        return int(min(self._settings.limits.wanted, sum(handle.slots for handle in self._handles.values())))

    def _stop(self, host: str) -> None:
        handle = self._handles.get(host)
        if handle is None:
            return
        was_heard, handle.is_ending = handle.peer in self._server.heard_at, True
        self._server.send(handle.peer, agent_messages.StopAgent())
        if was_heard:
            self._loop.call_later(STOP_GRACE, self._kill_handle, host, handle)
        else:  # it has no workers and may never connect. Kill it at once: the host may be added again
            self._kill_handle(host, handle)

    def _kill_handle(self, host: str, handle: AgentHandle) -> None:
        handle.kill()
        if handle.agent is None:
            self._agent_ended(host, handle, "it was not started")

    def _watch_end(self, handle: AgentHandle, process: str) -> None:
        if process:
            self._running.add(handle)
            self._none_runs.clear()

    def _agent_ended(self, host: str, handle: AgentHandle, reason: str) -> None:
        self._running.discard(handle)
        if not self._running:
            self._none_runs.set()
        if self._handles.get(host) is handle:
            self._note_end(handle, seen=not handle.was_killed)
            del self._handles[host]
            self._telemetry.host_samples.pop(host, None)
            self._server.forget(handle.peer)
            self._post_loss(host, handle, reason)

    def _post_loss(self, host: str, handle: AgentHandle | None, reason: str, silence: float = 0.0) -> None:
        number = handle.number if handle is not None else 0
        self._post(ev.AgentLost(host, printable_line(reason), silence, number))  # it may have the host's own words
        self._add_again(host, handle)

    def give_up(self, host: str) -> None:
        """Kill an agent that has not reported to this new driver."""
        self._add_again(host, self.kill(host))

    def _add_again(self, host: str, handle: AgentHandle | None) -> None:
        if handle is not None and returns(handle.agent, handle.returned):
            self._post(ev.HostAdded(HostSpec(host, handle.slots), "Kubernetes", by_hand=False))

    def _disconnected(self, host: str, handle: AgentHandle, reason: str, *, redials: bool = False) -> None:
        if self._handles.get(host) is handle:
            handle.disconnected_at = time.monotonic()
            self._post(HostDisconnected(host, printable_line(reason), handle.number, redials))

    def _tunnel_ended(self, host: str, number: int) -> None:
        handle = self._handles.get(host)
        if handle is not None and handle.number == number and not handle.is_ending and self._heard_at(handle):
            self._disconnected(host, handle, f"the connection of {host} has ended", redials=True)

    def has_reconnected(self, host: str) -> bool:
        """Whether a message of the host's agent has come since its connection ended."""
        handle = self._handles.get(host)
        return handle is not None and self._heard_at(handle) > handle.disconnected_at

    def _heard_at(self, handle: AgentHandle) -> float:
        """When the agent's last message came; 0 before the first."""
        return self._server.heard_at.get(handle.peer, 0.0)

    def lose(self, host: str, reason: str, silence: float = 0.0) -> None:
        """Kill an agent that is lost or unusable, and post its loss."""
        self._post_loss(host, self.kill(host), reason, silence)

    def is_superseded(self, event: ev.Event) -> bool:
        """Whether the host's next agent was started, or its connection was opened, before this was decided on."""
        if not isinstance(event, ev.AgentLost | HostDisconnected):
            return False
        handle = self._handles.get(event.host)
        replaced = event.number > 0 and handle is not None and handle.number != event.number
        return replaced or (isinstance(event, HostDisconnected) and self.has_reconnected(event.host))

    def kill(self, host: str) -> AgentHandle | None:
        """Kill the host's agent, if there is one, and forget it without an event."""
        handle = self._handles.pop(host, None)
        self._telemetry.host_samples.pop(host, None)
        if handle is not None:
            self._note_end(handle)
            self._server.forget(handle.peer)
            handle.kill()
        return handle

    def _note_end(self, handle: AgentHandle, *, seen: bool = False) -> None:
        """Note whether an agent on another machine has answered until its end, if it has connected. Pods and jobs end anyway.

        `seen`: its end is certain.
        """
        lives_on, heard_at = handle.driver_address and self._settings.tunnels, self._heard_at(handle)
        if lives_on and not self._settings.makes_pods and (heard_at or handle.is_adopted):
            answered = seen or (handle.is_ending and self._server.has_acknowledged(handle.peer))
            silence = self._clock.silence(heard_at, self._server.backlog.connections) if heard_at else math.inf
            self._unanswered.note_end(handle.host, 0.0 if answered else silence, self._clock.now())
