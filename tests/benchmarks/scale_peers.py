"""The simulated agents and workers of `tests.benchmarks.scale`."""

from __future__ import annotations

import heapq
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import zmq

from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.messages import HEAD
from nbelastic.system import open_files, versions
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.relay import Relay
from nbelastic.worker.telemetry import report_period
from tests.benchmarks.scale_driver import SLOTS

STORM = 0.02  # seconds within which all other workers raise
CHECK = 0.05  # seconds after which a host looks again for heartbeats and bundles that are due


class Pipe:
    """A socket in memory: `deliver` takes what is sent, and `arrived` has what the other end has sent."""

    def __init__(self, deliver: Callable[[list[bytes]], None]) -> None:
        self._deliver = deliver
        self.arrived: deque[list[bytes]] = deque()

    def send_multipart(self, frames: Sequence[bytes], _flags: int = 0) -> None:
        self._deliver(list(frames))

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        if not self.arrived:
            raise zmq.Again
        return self.arrived.popleft()

    def poll(self, _timeout: int, _flags: int) -> bool:
        return True


def lane(relay: Relay, name: str) -> Pipe:
    """A worker's socket, which ends at the agent in the same process."""
    return Pipe(lambda frames: relay.take(name.encode(), frames, time.monotonic()))


class Peer(Client):
    """One end of the link, without a thread, which counts the messages that it sends."""

    numbered = newest = all = 0

    def open(self, socket: Any) -> None:
        self.socket = socket
        self.heard_at = time.monotonic()

    @property
    def due(self) -> bool:
        return bool(self._queue or self._reports) or time.monotonic() >= self._heartbeat_at

    def work(self) -> None:
        """Do one turn of the link's thread."""
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
    """An agent and the ends of its workers, which share one socket to the driver."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, address: str, keys: Keys) -> None:
        self._at_end = ExitStack()
        self.agent = Peer(address, keys, name, agent_messages.ToAgent, self._receive)
        self.agent.open(self.agent._connect(context, self._at_end))
        self.agent._relay_socket = self
        self.fd = int(self.agent.socket.getsockopt(zmq.FD))
        self.receive: Callable[[Any], None] = lambda _: None
        self.peers: dict[bytes, Peer] = {}
        self.bundles = 0

    def _receive(self, message: Any) -> None:
        self.receive(message)

    def add(self, name: str, receive: Callable[[Any], None]) -> Peer:
        peer = self.peers[name.encode()] = Peer("", None, name, worker_messages.ToWorker, receive)
        peer.open(lane(self.agent._relay, name))
        return peer

    def send_multipart(self, frames: list[bytes], _flags: int = 0) -> None:
        """Deliver to one of the workers, as the relay's own socket does."""
        if frames[0] in self.peers:
            self.peers[frames[0]].socket.arrived.append(frames[1:])

    @property
    def due(self) -> bool:
        relay = self.agent._relay.wait(time.monotonic()) == 0
        return relay or self.agent.due or any(peer.due for peer in self.peers.values())

    def work(self) -> None:
        self.agent.work()
        for peer in list(self.peers.values()):
            if peer.due or peer.socket.arrived:
                peer.work()
        self.bundles += self.agent._relay.wait(time.monotonic()) == 0
        self.agent._send_to_driver(self.agent.socket)


class Worker:
    """A worker that joins each world, commits with each report, and leaves when asked to."""

    def __init__(self, w: WorkerId, link: Callable[[str, Callable[[Any], None]], Peer]) -> None:
        self.id, self.job, self.generation, self.left, self.commit = w, "", 0, 0, 0
        self.speaks = False  # whether it is rank 0
        self.world_size = 1
        self.link = link(f"worker/{w}", self._receive)
        self.link.send(worker_messages.WorkerProgress(w, 0, 0, {}))
        self.link.send(worker_messages.WorkerHello(w, 1))

    def _ready(self) -> None:
        self.generation = 0
        store = f"127.0.0.1:{1000 + self.id.slot}"
        holds = self.left > 0
        self.link.send(
            ev.WorkerReady(self.id, self.job, self.left, self.commit, clean=True, store=store, holds_state=holds)
        )

    def _leave(self, generation: int) -> None:
        if self.generation and self.generation <= generation:
            self.left = self.generation
            self._ready()

    def _receive(self, message: messages.Message) -> None:
        match message:
            case worker_messages.Formation(generation=generation) if generation > max(self.left, self.generation):
                self.generation = generation
                self.speaks = message.hosts[0][0] == self.id.host and message.hosts[0][1][0] == self.id.slot
                self.world_size = len(message.hosts) * SLOTS
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
        self._from_driver, self._parent, self._every = orders, parent, 1 / rate
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 20_000)
        self._epoll = select.epoll()
        self._hosts: dict[int, Host] = {}
        self._by_name: dict[str, Host] = {}
        self._workers: dict[str, Worker] = {}
        self._touched: set[int] = set()  # hosts of which a worker may have something to send
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
            due, self._touched = {fd for fd in self._touched if self._hosts[fd].due}, set()
            for fd in (active | due) & self._hosts.keys():
                self._hosts[fd].work()
            # Sending may lose an edge of a descriptor: hosts that have just worked are polled again.
            ready = {fd for fd, _ in self._epoll.poll(0.005)}
            if self._from_driver.fileno() in ready:
                self._execute(self._from_driver.recv())
            if self._parent.fileno() in ready:
                self._execute(self._parent.recv())
            active = ready | due

    def _execute(self, order: tuple[Any, ...]) -> None:
        match order:
            case ("agent", host, number, address, keys):
                self._start(host, number, address, keys)
            case ("kill", w) if w in self._workers:
                self._kill(self._workers.pop(w))
            case ("storm",):
                members = [worker for worker in self._workers.values() if worker.generation]
                for number, worker in enumerate(members):
                    self._after(STORM * number / len(members), lambda worker=worker: self._fail(worker))
            case ("event", w) if w in self._workers:
                worker = self._workers[w]
                worker.link.send(ev.StoreOffered(worker.id, worker.generation, "127.0.0.1:1"))
                self._touch(worker.id)
            case ("count",):
                hosts = self._hosts.values()
                peers = [peer for host in hosts for peer in (host.agent, *host.peers.values())]
                counts = [(peer.numbered, peer.newest, peer.all) for peer in peers]
                self._parent.send((counts, sum(host.bundles + host.agent.all for host in hosts)))

    def _touch(self, w: WorkerId) -> None:
        self._touched.add(self._by_name[w.host].fd)

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

        def check() -> None:
            self._touched.add(here.fd)
            self._after(CHECK, check)

        here.receive = receive
        agent.send(agent_messages.AgentHello(host, 1, versions.installed()))
        self._after(1.0, sample)
        check()

    def _fail(self, worker: Worker) -> None:
        worker.fail()
        self._touch(worker.id)

    def _report(self, worker: Worker) -> None:
        if str(worker.id) in self._workers:
            worker.report()
            self._touch(worker.id)
            every = max(self._every, report_period(worker.world_size, is_rank_0=worker.speaks))
            self._after(every, lambda: self._report(worker))

    def _kill(self, worker: Worker) -> None:
        host = self._by_name[worker.id.host]
        del host.peers[f"worker/{worker.id}".encode()]
        host.agent.send(ev.WorkerExited(worker.id, -9))
        self._touch(worker.id)


def play(orders: Connection, parent: Connection, rate: float) -> None:
    open_files.raise_limit()
    Players(orders, parent, rate).run()
