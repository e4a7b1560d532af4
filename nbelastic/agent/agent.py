"""One process per host: it forks workers from a warm template, watches them, samples psutil and NVML, and reports.

It ends, and every worker with it, when the driver says so, when its line to the driver's machine ends, when the cluster was
stopped or its owner has ended, or when no driver has come for the lease: then its workers have time for a last checkpoint. It
outlives a driver, and tells the next one what there is.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing as mp
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nbelastic.agent.fork import fork
from nbelastic.agent.gpus import Gpus
from nbelastic.agent.interfaces import candidates
from nbelastic.agent.nodes import Nodes
from nbelastic.agent.prober import TIMEOUT as PROBE_TIMEOUT
from nbelastic.agent.prober import Prober, endpoint
from nbelastic.agent.protocol import GRACE, Action, End, Fork, Introduce, Protocol, Say, Signal
from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import versions
from nbelastic.system.addresses import address_of, is_loopback
from nbelastic.system.folders import base, held_folder, kept
from nbelastic.system.presence import Presence
from nbelastic.system.processes import kill_group, state_of
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys

LATE = 2.0  # seconds by which a look may be late; later than that, this process itself was stopped
WATCH = 0.1  # seconds between looks at the workers' process states
SAMPLE = 1.0
LATE_TURN = 15.0  # seconds by which the main thread's next turn may be late; then this host is not heard any more
LAST_TURN = 60.0  # the same; then nobody will end this process and its workers any more, so it does
ORDER = 300.0  # seconds that one order may take: the first fork waits for what the template imports
ENTRY = ("nbelastic.programs.boot", "boot")  # by name: host and worker never import one another


class Config(msgspec.Struct, frozen=True):
    """What the driver tells an agent at its start, beside what `start` has used already."""

    host: str
    driver: str  # the hub's endpoint
    keys: Keys
    number: int  # of this agent: a later one of the same host is another
    presence: Presence | None  # of the driver, on its machine
    lease: float  # seconds without a driver after which it ends
    heartbeat: float  # seconds
    address: str  # the loopback address, on the same machine; empty elsewhere
    nics: tuple[str, ...]  # network interfaces to use; empty: any
    run_dir: str  # for what only this run needs; empty: a new one
    log_dir: str  # of the cluster, as its own machine has it
    settings: dict[str, str]  # for the workers


class _Forked:
    """A worker's process."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.stats = psutil.Process(process.pid)


class Agent:
    """`run()` until told to end. What concerns workers happens in the caller's thread."""

    def __init__(self, config: Config, lifeline: int) -> None:
        self._config, self._lifeline = config, lifeline
        self._inbox: deque[messages.Message] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = mp.get_context("forkserver")
        self._workers: dict[WorkerId, _Forked] = {}
        self._gpus = Gpus()
        self._done = False
        # When it ran again after it was stopped: it has not read yet what the driver sent meanwhile.
        self._back_at = 0.0
        self._protocol = Protocol(config.lease)
        peer = f"agent/{config.host}~{config.number}"
        self._turn_by = math.inf  # when the main thread will have come to its next turn
        self._vouched_at = 0.0
        self._link = Client(
            config.driver,
            config.keys,
            peer,
            agent_messages.ToAgent,
            self._receive,
            heartbeat=config.heartbeat,
            may_send=self._works,
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._take_leave())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.ExitStack() as at_end:
            self._settle(at_end)
            known = {"host": self._config.host, "relay": str(self._folder), "heartbeat": self._config.heartbeat}
            self._nodes = Nodes(self._context, known)
            self._link.start(relay=self._folder)
            at_end.callback(self._gpus.close)
            at_end.callback(self._link.close)
            at_end.callback(self._end_workers)
            at_end.callback(self._nodes.close)
            self._link.send(self._hello())
            try:
                self._serve()
            finally:
                self._turn_by = math.inf  # what is done at the end has deadlines of its own

    def _settle(self, at_end: contextlib.ExitStack) -> None:
        """Where it is, how it is reached, and a folder."""
        config = self._config
        local = bool(config.address)
        self._addresses = candidates(config.address or address_of(config.driver), config.nics, local)
        self._home = (self._addresses[0].address, self._addresses[0].name)
        # On the driver's machine nothing listens beyond loopback before there is a host elsewhere; its port is kept free.
        self._port = at_end.enter_context(_reserved(self._home[0])) if local else 0
        self._prober: Prober | None = None
        at_end.callback(self._be_gone)
        if not local:
            self._be_reached()
        run_dir = Path(config.run_dir or at_end.enter_context(held_folder()))
        self._profile = run_dir / "profile"  # the engines' IPython profile: an empty one
        self._profile.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"agent-{config.number}-", dir=run_dir))  # of this agent alone
        at_end.callback(shutil.rmtree, self._folder, ignore_errors=True)

    def _be_reached(self) -> Prober:
        if self._prober is None:
            outward = [i.address for i in self._addresses if not is_loopback(i.address)]
            self._prober = Prober(self._config.host, self._config.keys, outward, self._port)
            self._prober.start()
            self._port = self._prober.port
        return self._prober

    def _be_gone(self) -> None:
        if self._prober is not None:
            self._prober.close()

    def _hello(self) -> agent_messages.AgentHello:
        return agent_messages.AgentHello(
            self._config.host,
            os.getpid(),
            versions.here(),
            self._addresses,
            self._port,
            self._home[0],
            self._protocol.workers,
            dict(self._protocol.newest),
            self._nodes.numbers,
            self._nodes.ended,
        )

    def _probe(self, order: agent_messages.Probe) -> None:
        def done(reached: tuple[str, ...]) -> None:
            self._link.send(ev.Probed(self._config.host, order.target, reached, order.number))

        endpoints = [endpoint(address, order.port) for address in order.addresses]
        self._be_reached().probe(order.target, endpoints, PROBE_TIMEOUT, done)

    def _serve(self) -> None:
        line = [self._lifeline] if self._lifeline >= 0 else []
        watch_at = sample_at = 0.0
        last = time.monotonic()
        while not self._done:
            sentinels = {forked.process.sentinel: w for w, forked in self._workers.items()}
            timeout = WATCH if self._workers or self._nodes.sentinels else SAMPLE
            self._turn_by = time.monotonic() + timeout
            ready = connection.wait([self._wake, *line, *sentinels, *self._nodes.sentinels], timeout)
            now = time.monotonic()
            if now - last > timeout + LATE:
                self._back_at = now
            last = now
            if not self._done and any(fd in ready for fd in line):
                return
            heard_at = max(self._link.heard_at, self._back_at)
            if self._protocol.forsaken(heard_at, now):
                print(f"the driver at {self._config.driver} is not heard any more", file=sys.stderr)
                return
            for sentinel in ready:
                if sentinel in sentinels:
                    self._ended(sentinels[sentinel])
            for news in self._nodes.watch(now):
                self._link.send(news)
            self._obey()
            if now >= watch_at:
                watch_at = now + WATCH
                states = {w: state_of(forked.process.pid or 0) for w, forked in self._workers.items()}
                self._do(self._protocol.looked(states, now))
            if now >= sample_at:
                sample_at = now + SAMPLE
                self._sample(now)
                self._look_for_the_cluster(now)

    def _works(self) -> bool:
        """Whether the main thread, which carries out orders, comes to its turns; in the link's thread."""
        now = time.monotonic()
        if now - self._vouched_at > self._config.heartbeat + LATE:  # this thread did not run either
            self._turn_by = max(self._turn_by, now)
        self._vouched_at = now
        late = now - self._turn_by
        if late > LAST_TURN:
            os.write(2, b"nbelastic: the agent hangs, and ends\n")
            os._exit(1)  # the template ends the workers
        return late <= LATE_TURN

    def _look_for_the_cluster(self, now: float) -> None:
        presence = self._config.presence
        if presence is not None:
            if not presence.owned:
                self._protocol.orphaned(now)
            self._protocol.over = presence.driver is None

    def _receive(self, message: messages.Message) -> None:
        """In the link's thread, where networks are seen to: forking the first worker waits for the template's imports."""
        match message:
            case agent_messages.Probe():
                self._probe(message)
                return
            case messages.Rehome(address=address, interface=interface):
                self._home = (address, interface)
                self._be_reached()
                return
        self._inbox.append(message)
        os.eventfd_write(self._wake, 1)

    def _take_leave(self) -> None:
        """Say so first: those who train with its workers need not wait for silence."""
        self._link.send(agent_messages.AgentGoodbye(self._config.host, "its agent was told to end (SIGTERM)"))
        self._done = True
        os.eventfd_write(self._wake, 1)

    def _obey(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if poll.poll(0):
            os.eventfd_read(self._wake)
        while self._inbox:
            self._turn_by = time.monotonic() + ORDER
            match self._inbox.popleft():
                case agent_messages.Launch() as order:
                    self._nodes.launch(order, self._home, str(self._log_dir(order.log_dir)))
                case agent_messages.DeleteKeptState(by=by):
                    shutil.rmtree(kept(self._folder, by), ignore_errors=True)
                case agent_messages.StopNode(number=number, kill=kill):
                    self._nodes.recall(number, kill=kill)
                case order:
                    self._do(self._protocol.heard(order, time.monotonic()))
        self._turn_by = time.monotonic()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say(message=message):
                    self._link.send(message)
                case Introduce():
                    self._link.reset_session(self._hello)
                case Fork(order=order):
                    self._spawn(order)
                case Signal(worker=w, kill=kill):
                    kill_group(self._workers[w].process.pid or 0, signal.SIGKILL if kill else signal.SIGTERM)
                case End():
                    self._done = True

    def _spawn(self, order: agent_messages.Spawn) -> None:
        boot = getattr(importlib.import_module(ENTRY[0]), ENTRY[1])
        address, interface = self._home
        settings: dict[str, Any] = {
            "relay": str(self._folder),
            "worker": str(order.worker),
            "address": address,
            "interface": interface,
            "log_dir": str(self._log_dir(order.log_dir)),
            "heartbeat": self._config.heartbeat,
            "engine": order.engine,
            "profile": str(self._profile),
            "lease": self._config.lease,
            **self._config.settings,
        }
        name = str(order.worker)
        process = fork(lambda: self._context.Process(target=boot, args=(settings,), daemon=False, name=name))
        assert process.pid is not None
        try:
            self._workers[order.worker] = _Forked(process)
        except psutil.NoSuchProcess:  # it died within the blink since start()
            self._do(self._protocol.exited(order.worker, process.exitcode or 1))
            return
        self._do(self._protocol.forked(order.worker, process.pid))

    def _log_dir(self, asked: str) -> Path:
        """Elsewhere the driver's folder may not be writable, or not be there: ours has the same name."""
        if self._config.address:
            return Path(asked)
        return base() / "logs" / Path(self._config.log_dir).name / Path(asked).name

    def _ended(self, w: WorkerId) -> None:
        process = self._workers[w].process
        process.join()
        self._do(self._protocol.exited(w, process.exitcode or 0))
        del self._workers[w]
        process.close()

    def _sample(self, now: float) -> None:
        workers: dict[str, tuple[float, int]] = {}
        for w, forked in self._workers.items():
            try:
                with forked.stats.oneshot():
                    workers[str(w)] = (forked.stats.cpu_percent(), forked.stats.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        memory, gpus = psutil.virtual_memory(), self._gpus.sample()
        cpu = psutil.cpu_percent()
        blocked = self._protocol.blocked(now)
        self._link.report(
            agent_messages.AgentSample(self._config.host, cpu, memory.used, workers, gpus, memory.total, blocked)
        )

    def _end_workers(self) -> None:
        for forked in self._workers.values():
            kill_group(forked.process.pid or 0)
        for forked in self._workers.values():
            forked.process.join(GRACE)
            kill_group(forked.process.pid or 0)


@contextlib.contextmanager
def _reserved(address: str) -> Iterator[int]:
    """A free port, which nobody else gets meanwhile."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.bind((address, 0))
        yield int(holder.getsockname()[1])


def run(config: bytes, lifeline: int) -> None:
    """Be the agent that `config` (JSON) describes, until `lifeline` (a descriptor, or -1) becomes readable."""
    Agent(msgspec.json.decode(config, type=Config), lifeline).run()
