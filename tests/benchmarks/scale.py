"""What the driver does with many workers: `python -m tests.benchmarks.scale [--json FILE] [--workers N] [--rate R]`.

Driver, link and core are the real ones, in a process of their own. Agents and workers are simulated: two processes
play them, each agent with its own CURVE connection and the project's relay, each worker with the project's delivery.
Engines and process groups are left out.

The cases: `start` until all workers are ready; `form` until a job's world runs; `steady` reports of all workers; `storm`:
a worker dies and all others raise; `stop`: the driver's process is stopped (SIGSTOP) for 4 s, and a worker sends
an event before it goes on. `caught up` is how long after SIGCONT that event is taken, with all that queues before it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing as mp
import os
import select
import signal
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import zmq

from nbelastic.core import commands as cmd
from nbelastic.core.membership import step
from nbelastic.core.state import ClusterState
from nbelastic.driver import decisions
from nbelastic.driver.dependencies import Dependencies
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.request_answers import ready_workers
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.messages import HEAD
from nbelastic.system import open_files, versions
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.relay import Relay
from tests.driver.fakes import driver_for, settings_for
from tests.support import driver_thread

SLOTS = 8
PLAYERS = 2  # processes
RARELY = 1.0  # seconds between two reports of a rank that is not 0
STOPPED = 4.0  # seconds
STORM = 0.02  # seconds within which the others raise
PATIENCE = 120.0  # seconds for each case
Numbers = dict[str, list[float]]


# ---- the driver's process ----


class SimulatedAgent:
    """Takes the place of an agent's process."""

    process = job = ""

    def __init__(self, tell: Callable[..., None], host: str, number: int) -> None:
        self._tell, self._host, self._number = tell, host, number

    def start(self, config: Mapping[str, Any]) -> None:
        self._tell("agent", self._host, self._number, config["driver"], msgspec.convert(config["keys"], Keys))

    def kill(self) -> None:
        """It ends with the benchmark."""


class NoController:
    """Nobody asks for engines."""

    connection, process = "{}", ""

    async def start(self) -> None:
        """There is none."""

    async def stop(self) -> None:
        """There is none."""


async def here(_spec: HostSpec, _launcher: str) -> tuple[str, str]:
    """All hosts are this machine."""
    return "127.0.0.1", ""


def drive(hosts: int, parent: Connection, players: list[Connection]) -> None:
    """Be the driver; tell the parent of each event that stands for something, and answer its questions."""

    def tell(*order: Any) -> None:
        players[hash_of(order[1]) % len(players)].send(order)

    taken: list[tuple[float, float, str]] = []

    def timed(cluster: ClusterState, event: ev.Event, now: float) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
        taken.append((time.monotonic(), time.thread_time(), type(event).__name__))
        return step(cluster, event, now)

    open_files.raise_limit()
    decisions.step = timed
    dependencies = Dependencies(
        locate=here,
        agent_for=lambda spec, _local, _settings, _on_stop, number: SimulatedAgent(tell, spec.name, number),
        controller=lambda *_, **__: NoController(),
    )
    with tempfile.TemporaryDirectory() as folder:
        names = ",".join(f"host{number:04}:{SLOTS}" for number in range(hosts))
        settings = settings_for(Path(folder), names, SLOTS, min=1, max=hosts * SLOTS, cooldown=(0, 0))
        driver = driver_for(settings, dependencies)
        thread = driver_thread.DriverThread(driver)

        while True:
            match parent.recv():
                case "submit":
                    job = JobRun("job-1", worker_messages.Program("job-1", "", source="a cell"))
                    thread.call(driver.jobs.submit, job, SavedJob("job-1"))
                case "look":
                    cluster = driver.cluster
                    members = list(map(str, cluster.members))
                    cpu = (time.process_time(), time.clock_gettime(time.pthread_getcpuclockid(thread.ident)))
                    parent.send((cluster.phase, ready_workers(cluster), members, *cpu, list(taken)))
                    taken.clear()


def hash_of(name: str) -> int:
    """The same for a host and all of its workers."""
    return int(name.partition("/")[0].removeprefix("host"))


# ---- simulated agents and workers ----


class Lane:
    """A worker's socket: it ends at the agent, in the same process."""

    def __init__(self, relay: Relay, name: str) -> None:
        self._relay, self._name = relay, name.encode()
        self.came: deque[list[bytes]] = deque()

    def send_multipart(self, frames: Sequence[bytes], _flags: int = 0) -> None:
        self._relay.take(self._name, frames, time.monotonic())

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        if not self.came:
            raise zmq.Again
        return self.came.popleft()

    def poll(self, _timeout: int, _flags: int) -> bool:
        return True


class Peer(Client):
    """An end of the link without a thread of its own, which counts what it sends."""

    numbered = newest = all = 0

    def open(self, socket: Any) -> None:
        self.socket = socket
        self.heard_at = time.monotonic()

    @property
    def due(self) -> bool:
        return bool(self._out or self._reports) or time.monotonic() >= self._heartbeat_at

    def work(self) -> None:
        """What the thread does in its turn."""
        self._receive_batch(self.socket)
        self._flush(self.socket)
        if time.monotonic() >= self._heartbeat_at:
            self._send_all(self.socket, [(self._delivery.head(), b"")])

    def _send_all(self, socket: zmq.Socket[bytes], messages: list[tuple[bytes, bytes]]) -> None:
        for head, _ in messages:
            number = HEAD.unpack(head)[1]
            self.all += 1
            self.numbered += number > 0
            self.newest = max(self.newest, number)
        super()._send_all(socket, messages)


class Host:
    """An agent, and the ends of its workers: a socket to the driver for all of them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, address: str, keys: Keys) -> None:
        self._at_end = ExitStack()
        self.agent = Peer(address, keys, name, agent_messages.ToAgent, self._hear)
        self.agent.open(self.agent._connect(context, self._at_end))
        self.agent._relay_socket = self
        self.fd = int(self.agent.socket.getsockopt(zmq.FD))
        self.receive: Callable[[Any], None] = lambda _: None
        self.peers: dict[bytes, Peer] = {}
        self.bundles = 0

    def _hear(self, message: Any) -> None:
        self.receive(message)

    def add(self, name: str, hear: Callable[[Any], None]) -> Peer:
        peer = self.peers[name.encode()] = Peer("", None, name, worker_messages.ToWorker, hear)
        peer.open(Lane(self.agent._relay, name))
        return peer

    def send_multipart(self, frames: list[bytes], _flags: int = 0) -> None:
        """As the relay's own socket: to one of the workers."""
        if frames[0] in self.peers:
            self.peers[frames[0]].socket.came.append(frames[1:])

    @property
    def due(self) -> bool:
        relay = self.agent._relay.wait(time.monotonic()) == 0
        return relay or self.agent.due or any(peer.due for peer in self.peers.values())

    def work(self) -> None:
        self.agent.work()
        for peer in list(self.peers.values()):
            if peer.due or peer.socket.came:
                peer.work()
        self.bundles += self.agent._relay.wait(time.monotonic()) == 0
        self.agent._send_to_driver(self.agent.socket)


class Worker:
    """It joins every world that it is told of, commits with every report, and leaves when it is to."""

    def __init__(self, w: WorkerId, link: Callable[[str, Callable[[Any], None]], Peer]) -> None:
        self.id, self.job, self.generation, self.left, self.commit = w, "", 0, 0, 0
        self.speaks = False  # it is rank 0
        self.link = link(f"worker/{w}", self._hear)
        self.link.send(worker_messages.WorkerProgress(w, 0, 0, {}))
        self.link.send(worker_messages.WorkerHello(w, 1, str(w)))

    def _ready(self) -> None:
        self.generation = 0
        store = f"127.0.0.1:{1000 + self.id.slot}"
        holds = self.left > 0
        self.link.send(ev.WorkerReady(self.id, self.job, self.left, self.commit, clean=True, store=store, holds=holds))

    def _leave(self, generation: int) -> None:
        if self.generation and self.generation <= generation:
            self.left = self.generation
            self._ready()

    def _hear(self, message: messages.Message) -> None:
        match message:
            case worker_messages.Formation(generation=generation) if generation > max(self.left, self.generation):
                self.generation = generation
                self.speaks = message.hosts[0][0] == self.id.host and message.hosts[0][1][0] == self.id.slot
                self.link.send(ev.WorkerFormed(self.id, generation, {}))
            case worker_messages.Program(job=job):
                self.job = job
                self._ready()
            case worker_messages.Prepare(formation=formation):
                self.link.send(ev.WorkerPrepared(self.id, formation.generation))
            case worker_messages.Abort(generation=generation):
                self._leave(generation)
            case worker_messages.Leave(generation=generation, commit=None, ask=ask):
                self.link.send(ev.LeaveAcknowledged(self.id, generation, self.commit, ask))
            case worker_messages.Leave(generation=generation, commit=commit) if commit is not None and commit >= 0:
                self._leave(generation)

    def report(self) -> None:
        if self.generation:
            self.commit += 1
            self.link.report(
                worker_messages.WorkerProgress(self.id, self.generation, self.commit, {"loss": 1 / self.commit})
            )

    def fail(self) -> None:
        self.link.send(ev.WorkerRaised(self.id, self.generation, False, "RuntimeError: Connection closed by peer"))


class Players:
    """All simulated agents and workers of one process."""

    def __init__(self, orders: Connection, parent: Connection, rate: float) -> None:
        self._orders, self._parent, self._every = orders, parent, 1 / rate
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 20_000)
        self._epoll = select.epoll()
        self._hosts: dict[int, Host] = {}
        self._by_name: dict[str, Host] = {}
        self._workers: dict[str, Worker] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for connection in (orders, parent):
            self._epoll.register(connection, select.EPOLLIN)

    def run(self) -> None:
        active: set[int] = set()
        while True:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            due = {fd for fd, host in self._hosts.items() if host.due}
            for fd in (active | due) & self._hosts.keys():
                self._hosts[fd].work()
            # an edge of a descriptor may be lost when something is sent: look again at who has just worked
            ready = {fd for fd, _ in self._epoll.poll(0.005)}
            if self._orders.fileno() in ready:
                self._obey(self._orders.recv())
            if self._parent.fileno() in ready:
                self._obey(self._parent.recv())
            active = ready | due

    def _obey(self, order: tuple[Any, ...]) -> None:
        match order:
            case ("agent", host, number, address, keys):
                self._start(host, number, address, keys)
            case ("kill", w) if w in self._workers:
                self._kill(self._workers.pop(w))
            case ("storm",):
                everybody = [worker for worker in self._workers.values() if worker.generation]
                for number, worker in enumerate(everybody):
                    self._after(STORM * number / len(everybody), worker.fail)
            case ("event", w) if w in self._workers:
                worker = self._workers[w]
                worker.link.send(ev.StoreOffered(worker.id, worker.generation, "127.0.0.1:1"))
            case ("count",):
                hosts = self._hosts.values()
                peers = [peer for host in hosts for peer in (host.agent, *host.peers.values())]
                counts = [(peer.numbered, peer.newest, peer.all) for peer in peers]
                self._parent.send((counts, sum(host.bundles + host.agent.all for host in hosts)))

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, call))

    def _start(self, host: str, number: int, address: str, keys: Keys) -> None:
        here = self._by_name[host] = Host(self._context, f"agent/{host}~{number}", address, keys)
        self._hosts[here.fd], agent = here, here.agent
        self._epoll.register(here.fd, select.EPOLLIN)

        def receive(message: messages.Message) -> None:
            if isinstance(message, agent_messages.Spawn):
                worker = self._workers[str(message.worker)] = Worker(message.worker, here.add)
                agent.send(ev.WorkerStarted(message.worker, 1))
                first = self._every * (self._count % 100) / 100
                self._after(first, lambda: self._report(worker))

        def sample() -> None:
            agent.report(agent_messages.AgentSample(host, 1.0, 1, {}))
            self._after(1.0, sample)

        here.receive = receive
        agent.send(agent_messages.AgentHello(host, 1, versions.here()))
        self._after(1.0, sample)

    def _report(self, worker: Worker) -> None:
        if str(worker.id) in self._workers:
            worker.report()
            every = self._every if worker.speaks else max(self._every, RARELY)
            self._after(every, lambda: self._report(worker))

    def _kill(self, worker: Worker) -> None:
        host = self._by_name[worker.id.host]
        del host.peers[f"worker/{worker.id}".encode()]
        host.agent.send(ev.WorkerExited(worker.id, -9))


def play(orders: Connection, parent: Connection, rate: float) -> None:
    open_files.raise_limit()
    Players(orders, parent, rate).run()


# ---- the cases ----


class Scale:
    """The processes, and what is asked of them."""

    def __init__(self, workers: int, rate: float) -> None:
        context = mp.get_context("spawn")
        self.size = workers // SLOTS * SLOTS
        pipes = [context.Pipe() for _ in range(PLAYERS)]  # from the driver
        lines = [context.Pipe() for _ in range(PLAYERS + 1)]  # from here
        self._players = [ours for ours, _ in lines[1:]]
        self._driver = lines[0][0]
        theirs = [there for _, there in lines]
        self.process = context.Process(
            target=drive, args=(workers // SLOTS, theirs[0], [here for here, _ in pipes]), daemon=True
        )
        self._processes = [self.process]
        for (_, orders), parent in zip(pipes, theirs[1:], strict=True):
            self._processes.append(context.Process(target=play, args=(orders, parent, rate), daemon=True))
        self.began = time.monotonic()
        for process in self._processes:
            process.start()
        self.taken: list[tuple[float, float, str]] = []  # when, the driver's thread's CPU seconds then, which event

    def close(self) -> None:
        for process in reversed(self._processes):  # the players would miss the driver
            process.kill()
            process.join()

    def look(self) -> tuple[str, int, list[str], float, float]:
        """Phase, ready workers, members, and the CPU seconds of the driver's process and of its thread."""
        self._driver.send("look")
        *found, taken = self._driver.recv()
        self.taken += taken
        return tuple(found)

    def until(self, what: str, true: Callable[[str, int, list[str]], bool]) -> tuple[float, float]:
        """When it came about, and the driver's CPU seconds until then."""
        end = time.monotonic() + PATIENCE
        while True:
            phase, ready, members, cpu, _ = self.look()
            if true(phase, ready, members):
                return time.monotonic(), cpu
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: {phase}, {ready} ready, {len(members)} members after {PATIENCE:g} s")
            time.sleep(0.02)

    def submit(self) -> None:
        self._driver.send("submit")

    def tell(self, *order: Any) -> None:
        """All players."""
        for player in self._players:
            player.send(order)

    def counted(self) -> tuple[list[tuple[int, int, int]], int]:
        """Of each living peer: numbered messages sent, how many different ones, and all; and how many the driver has got."""
        self.tell("count")
        found = [player.recv() for player in self._players]
        return [each for counts, _ in found for each in counts], sum(got for _, got in found)


def run(workers: int, rate: float, seconds: float, rounds: int) -> Numbers:
    found: Numbers = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name.replace("_", " "), []).append(value)

    scale = Scale(workers, rate)
    whole = lambda phase, ready, members: phase == "running" and len(members) == scale.size
    try:
        at, cpu = scale.until("all are ready", lambda _phase, ready, _members: ready == scale.size)
        note(start_s=at - scale.began, start_CPU_s=cpu)
        scale.submit()
        began, before = time.monotonic(), cpu
        at, cpu = scale.until("a world of all", whole)
        note(form_s=at - began, form_CPU_s=cpu - before)
        for _ in range(rounds):
            (counts, got_before), got_after = scale.counted(), 0
            sent = sum(every for *_, every in counts)
            began, before = time.monotonic(), scale.look()[3]
            time.sleep(seconds)
            cpu, end = scale.look()[3], time.monotonic()
            counts, got_after = scale.counted()
            note(
                steady_messages_per_s=(sum(every for *_, every in counts) - sent) / (end - began),
                steady_bundles_per_s=(got_after - got_before) / (end - began),
                steady_CPU_percent=100 * (cpu - before) / (end - began),
            )
        for number in range(rounds):
            storm(scale, number, note, whole)
        for _ in range(rounds):
            stop(scale, note, whole)
        counts = [(numbered, newest) for numbered, newest, _ in scale.counted()[0] if newest]
        for numbered, newest in counts:
            note(sent_per_message=numbered / newest)
        note(sent_per_message_on_average=sum(a for a, _ in counts) / sum(b for _, b in counts))
    finally:
        scale.close()
    return found


def storm(scale: Scale, number: int, note: Callable[..., None], whole: Callable[[str, int, list[str]], bool]) -> None:
    """One dies and all others raise."""
    members, before, _ = scale.look()[2:]
    began = time.monotonic()
    victim = members[number]
    scale.tell("kill", victim)
    scale.tell("storm")
    at, _ = scale.until("a world after the storm", lambda phase, _ready, now: phase == "running" and victim not in now)
    note(storm_running_s=at - began)
    at, cpu = scale.until("a world of all again", whole)
    note(storm_full_s=at - began, storm_CPU_s=cpu - before)


def stop(scale: Scale, note: Callable[..., None], whole: Callable[[str, int, list[str]], bool]) -> None:
    """The driver's process is stopped, and a worker sends an event before it goes on."""
    members, _, thread_before = scale.look()[2:]
    pid = scale.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED - 0.5)
    scale.tell("event", members[-1])
    time.sleep(0.5)
    scale.taken.clear()
    began = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    scale.until("the event", lambda *_: any(name == "StoreOffered" for at, _, name in scale.taken if at > began))
    at, thread = next((at, cpu) for at, cpu, name in scale.taken if at > began and name == "StoreOffered")
    note(stop_caught_up_s=at - began, stop_thread_CPU_s=thread - thread_before)
    scale.until("the same world", whole)
    assert sorted(scale.look()[2]) == sorted(members), "a worker was given up though nothing was wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--workers", type=int, default=1000, help="in whole hosts of 8")
    parser.add_argument("--rate", type=float, default=4.0, help="reports a second of rank 0; others make one")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each steady measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = run(options.workers, options.rate, options.seconds, options.rounds)
    print(f"{f'{options.workers} workers, {options.rate:g} reports/s':38}{'min':>10}{'median':>10}{'max':>10}{'n':>7}")
    for name, values in found.items():
        row = (min(values), statistics.median(values), max(values))
        print(f"{name:38}{''.join(f'{value:10.3f}' for value in row)}{len(values):7}")
    if options.json:
        options.json.write_text(json.dumps({"workers": options.workers, "rate": options.rate, **found}, indent=1))


if __name__ == "__main__":
    main()
