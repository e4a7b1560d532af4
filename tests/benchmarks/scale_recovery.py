"""The driver's CPU time for one recovery of many workers: `python -m tests.benchmarks.scale_recovery [--workers N]`.

Driver, core, the server's code, relays and deliveries are the real ones. They run in one thread, without sockets and
heartbeats. The CPU time of the simulated hosts is not counted. All messages of a host that wait go into one bundle.

One worker dies and all others raise. `abort` lasts until the aborts are sent, `break` until the survivors' next world runs, and
`rejoin` from then until its replacement trains too. `calls` are Python function calls per worker in both, in one more recovery with `--profile`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbelastic.core.state import Stage
from nbelastic.driver.dependencies import Dependencies
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.timeouts import Timeouts
from nbelastic.system import versions
from nbelastic.transport.server import Server
from tests.benchmarks.scale_driver import SLOTS, NoController, here
from tests.benchmarks.scale_peers import Peer, Pipe, Worker, lane
from tests.driver.fakes import driver_for, settings_for

SILENCE = 3600.0  # seconds; heartbeats are rarer than any message is late
MOST = 60  # lines of each table that `--profile` prints


class SocketlessServer(Server):
    """The driver's end without its socket and its heartbeats."""

    deliver: Callable[[list[bytes]], None]

    async def start(self, interface: str = "127.0.0.1", port: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self.pipe = self._socket = Pipe(self.deliver)  # type: ignore[assignment]
        self.address = f"tcp://{interface}:{port or 1}"

    async def stop(self) -> None:
        self._closing = True


class Host:
    """An agent, its relay and its workers."""

    process = job = ""

    def __init__(self, fleet: Fleet, name: str, number: int) -> None:
        self._fleet, self.name, self._peer_name = fleet, name, f"agent/{name}~{number}"
        self.agent = Peer("", None, self._peer_name, agent_messages.ToAgent, self._receive, heartbeat=SILENCE)
        self.pipe = Pipe(lambda frames: fleet.send(self._peer_name, frames))
        self.agent.open(self.pipe)
        self.agent._relay_socket = self
        self.peers: dict[bytes, Peer] = {}

    def start(self, _config: Mapping[str, Any]) -> None:
        self._fleet.hosts[self._peer_name] = self
        self.agent.send(agent_messages.AgentHello(self.name, 1, versions.installed()))
        self._fleet.busy.add(self)

    def kill(self) -> None:
        """Do nothing: there is no process."""

    def _receive(self, message: messages.Message) -> None:
        if isinstance(message, agent_messages.Spawn):
            self._fleet.workers[message.worker] = Worker(message.worker, self._add)
            self.agent.send(ev.WorkerStarted(message.worker, 1))

    def _add(self, name: str, receive: Callable[[Any], None]) -> Peer:
        peer = self.peers[name.encode()] = Peer("", None, name, worker_messages.ToWorker, receive, heartbeat=SILENCE)
        peer.open(lane(self.agent._relay, name))
        return peer

    def send_multipart(self, frames: list[bytes], _flags: int = 0) -> None:
        """Deliver to one of the workers, as the relay's own socket does."""
        if frames[0] in self.peers:
            self.peers[frames[0]].socket.arrived.append(frames[1:])

    def work(self) -> None:
        """Handle all that has arrived, and send the answers in one bundle."""
        self.agent.work()
        for peer in list(self.peers.values()):
            if peer.due or peer.socket.arrived:
                peer.work()
        self.agent._send_to_driver(self.pipe)


class Fleet:
    """All hosts."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.busy: set[Host] = set()
        self.sent = self.received = 0  # bundles and single messages, by the driver
        self.seconds = 0.0  # of CPU time

    def make_server(self, keys: Any, on_message: Any, _heartbeat: float, *others: Any) -> SocketlessServer:
        self.server = SocketlessServer(keys, on_message, SILENCE, *others)
        self.server.deliver = self._deliver
        return self.server

    def _deliver(self, frames: list[bytes]) -> None:
        self.sent += 1
        host = self.hosts.get(frames[0].decode())
        if host is not None:
            host.pipe.arrived.append(frames[1:])
            self.busy.add(host)

    def send(self, peer: str, frames: list[bytes]) -> None:
        """Send this to the driver."""
        self.received += 1
        self.server.pipe.arrived.append([peer.encode(), *frames])

    def work(self) -> None:
        """Let all hosts work to which the driver has sent something."""
        began = time.thread_time()
        busy, self.busy = self.busy, set()
        for host in busy:
            host.work()
        self.server._schedule_read()
        self.seconds += time.thread_time() - began

    def kill(self, victim: WorkerId) -> None:
        """Kill one worker; all others raise."""
        dead = self.workers.pop(victim)
        for host in self.hosts.values():
            if host.peers.pop(dead.link._name.encode(), None) is not None:
                host.agent.send(ev.WorkerExited(victim, -9))
        for worker in self.workers.values():
            worker.fail()
        self.busy.update(self.hosts.values())


class Measured:
    """The driver and its hosts in this thread."""

    def __init__(self, hosts: int, folder: Path) -> None:
        self.fleet = Fleet()
        names = ",".join(f"host{number:04}:{SLOTS}" for number in range(hosts))
        settings = settings_for(
            folder,
            names,
            SLOTS,
            min=1,
            max=hosts * SLOTS,
            cooldown=(0, 0),
            silence=3 * SILENCE,
            timeouts=Timeouts(settle=0.0),
        )
        dependencies = Dependencies(
            server=self.fleet.make_server,
            locate=here,
            agent_for=lambda spec, _local, _settings, *, number, **_: Host(self.fleet, spec.name, number),
            controller=lambda *_, **__: NoController(),
        )
        self.driver = driver_for(settings, dependencies)
        self.profile: cProfile.Profile | None = None

    async def until(self, true: Callable[[], bool]) -> float:
        """Let driver and hosts work in turn until this is true; return the driver's CPU seconds."""
        fleet = self.fleet
        began, hosts_before = time.thread_time(), fleet.seconds
        while not true():
            if self.profile:
                self.profile.disable()
            fleet.work()
            if self.profile:
                self.profile.enable()
            await asyncio.sleep(0 if fleet.server.pipe.arrived else 0.001)
        if self.profile:
            self.profile.disable()
        return time.thread_time() - began - (fleet.seconds - hosts_before)

    def is_running(self, size: int) -> bool:
        cluster = self.driver.cluster
        return cluster.phase == "running" and len(cluster.members) == size

    async def recover(self, number: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
        """Kill this rank; return the driver's CPU seconds, and the frames that it has sent and received until the break is over."""
        size = len(self.driver.cluster.members)
        victim, generation = self.driver.cluster.members[number], self.driver.cluster.generation
        for worker in self.fleet.workers.values():  # each has made commits, and so offers a store
            worker.link.send(ev.StoreOffered(worker.id, worker.generation, "127.0.0.1:1"))
        self.fleet.busy.update(self.fleet.hosts.values())
        await self.until(lambda: all(worker.store for worker in self.driver.cluster.workers.values()))
        bundles = self.fleet.sent, self.fleet.received
        self.fleet.kill(victim)
        self.profile = profile
        aborted = await self.until(lambda: self.driver.cluster.stage is Stage.GATHERING)
        self.profile = profile
        broken = aborted + await self.until(
            lambda: self.driver.cluster.generation > generation and self.is_running(len(self.driver.cluster.members))
        )
        sent, received = self.fleet.sent - bundles[0], self.fleet.received - bundles[1]
        rejoined = await self.until(lambda: self.is_running(size))
        hosts = len(self.fleet.hosts)
        return {
            "abort_CPU_s": aborted,
            "break_CPU_s": broken,
            "rejoin_CPU_s": rejoined,
            "frames_sent_per_host": sent / hosts,
            "received_per_host": received / hosts,
        }


def note(**values: float) -> None:
    """Print these values."""
    print("  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in values.items()), flush=True)


async def measure(workers: int, rounds: int, *, profiled: bool) -> None:
    size = workers // SLOTS * SLOTS
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(workers // SLOTS, Path(folder))
        ready = asyncio.Event()
        serving = asyncio.create_task(measured.driver.serve(ready.set))
        await ready.wait()
        driver = measured.driver
        started = await measured.until(lambda: len(driver.cluster.workers) == size and not driver.cluster.unregistered)
        driver.jobs.submit(JobRun("job-1", worker_messages.Program("job-1", "", source="a cell")), SavedJob("job-1"))
        formed = await measured.until(lambda: measured.is_running(size))
        note(start_CPU_s=started, form_CPU_s=formed)
        for number in range(rounds):
            note(**await measured.recover(number))
        if profiled:
            profile = cProfile.Profile()
            await measured.recover(rounds, profile)
            stats = pstats.Stats(profile)
            note(calls_per_worker=stats.total_calls / size)  # type: ignore[attr-defined]
            stats.sort_stats("tottime").print_stats(MOST)
            stats.sort_stats("cumtime").print_stats(MOST)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000, help="in whole hosts of 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the most expensive functions")
    options = parser.parse_args()
    asyncio.run(measure(options.workers, options.rounds, profiled=options.profile))


if __name__ == "__main__":
    main()
