"""The agent's process: it forks workers from the template, watches them, and sends samples of psutil and NVML.

It ends, with its workers, in four cases: the driver stops it; the pipe to the process that has started it ends; the cluster
has stopped or its owner has ended; or no driver has sent anything for the lease. In the last case its workers first have
time for a last checkpoint. The agent outlives a driver, and reports its state to the next one.
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
import tempfile
import time
from collections import deque
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nbelastic.agent import cloud_notices, time_limit
from nbelastic.agent.code_store import CodeStore
from nbelastic.agent.config import Config
from nbelastic.agent.environment import Environment
from nbelastic.agent.fork import ForkRefusedError, fork
from nbelastic.agent.gpu_health import HELD
from nbelastic.agent.gpu_samples import Gpus
from nbelastic.agent.host_addresses import addresses_by_preference
from nbelastic.agent.nodes import Nodes
from nbelastic.agent.prober import TIMEOUT as PROBE_TIMEOUT
from nbelastic.agent.prober import Prober, endpoint
from nbelastic.agent.protocol import KILL_AFTER, Action, End, Fork, Harm, Protocol, Send, SendHello, Signal
from nbelastic.agent.worker_process import WorkerProcess
from nbelastic.protocol import agent_messages, code_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.ids import Gpu, WorkerId
from nbelastic.protocol.local_clusters import remove_without_driver
from nbelastic.system import running_agents, versions
from nbelastic.system.addresses import address_of, is_loopback
from nbelastic.system.folder_paths import code_folder, kept_state_folder, log_file, process_folder, user_folder
from nbelastic.system.log_line import log_line
from nbelastic.system.ports import reserved_port
from nbelastic.system.processes import kill_group, state_of
from nbelastic.system.running_agents import Notice
from nbelastic.system.tunnel_folder import driver_endpoint
from nbelastic.transport.client import Client

SUSPENDED = 2.0  # seconds; a thread that runs later than planned by more than this was stopped with its process
CHECK = 0.1  # seconds between checks of the workers' process states
SAMPLE = 1.0  # seconds between samples
FIND_GPUS = 10.0  # seconds in which NVML must list the GPUs; later ones are reported as soon as it does
SILENT_AFTER = 15.0  # seconds by which the main thread is late; then the link sends nothing, as the thread may hang
EXIT_AFTER = 60.0  # seconds by which the main thread is late; then the process exits, as nothing else would end it
MESSAGE_TIMEOUT = 300.0  # seconds in which the main thread handles a message; the first fork waits for the template
ENTRY = ("nbelastic.programs.boot", "boot")  # by name: the agent must not import it


class Agent:
    """Runs until it must end. The caller's thread handles workers; the link's thread handles probes and new addresses."""

    def __init__(self, config: Config, parent_pipe: int, environment: Environment) -> None:
        self._config, self._parent_pipe, self._environment = config, parent_pipe, environment
        self._inbox: deque[messages.Message] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = mp.get_context("forkserver")
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._gpus = Gpus()
        self._reported_gpus: tuple[Gpu, ...] = ()
        self._waiting: dict[WorkerId, tuple[agent_messages.Spawn, float]] = {}  # for modules; for a GPU until then
        self._done = False
        # Not handled yet, and when they came; None: SIGTERM
        self._notices: deque[tuple[float, Notice | None]] = deque()
        # When the process last continued after it was stopped. Messages that the driver sent meanwhile are not read yet.
        self._continued_at = 0.0
        self._protocol = Protocol(config.host, config.lease, config.notice)
        peer = f"agent/{config.host}~{config.number}"
        self._turn_by = math.inf  # when the main thread must have begun its next turn
        self._checked_at = 0.0  # when the link's thread last checked that
        self._link = Client(
            driver_endpoint(config.driver, config.tunnel),
            config.keys,
            peer,
            agent_messages.ToAgent,
            self._receive,
            heartbeat=config.heartbeat,
            may_send=self._main_thread_runs,
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._on_notice(None))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._config.successor:
            time_limit.watch(self._config.successor, self._on_notice)
        with contextlib.ExitStack() as at_end:
            self._set_up(at_end)
            common = {"host": self._config.host, "relay": str(self._folder), "heartbeat": self._config.heartbeat}
            self._nodes = Nodes(self._context, common)
            self._link.start(relay=self._folder)
            for close in (self._gpus.close, self._link.close, self._end_workers, self._nodes.close):
                at_end.callback(close)
            at_end.callback(self._environment.close)
            self._reported_gpus = self._gpus.find(FIND_GPUS)
            self._link.send(self._introduction())
            cloud_notices.start(self._on_notice)
            try:
                is_abandoned = self._serve()
            finally:
                self._turn_by = math.inf  # the steps at the end have their own deadlines
        if is_abandoned and self._config.driver_lease is not None:
            remove_without_driver(self._config.driver_lease)  # nothing else may be there to do that

    def _set_up(self, at_end: contextlib.ExitStack) -> None:
        """Find this host's addresses, start the prober if hosts of other machines need it, and make the folders."""
        config = self._config
        on_driver_machine = bool(config.address)
        towards = config.address or config.towards or address_of(config.driver)
        self._addresses = addresses_by_preference(towards, config.nics, on_driver_machine)
        self._home = (self._addresses[0].address, self._addresses[0].name)  # address and interface of stores
        # On the driver's machine the prober is started with the first host elsewhere. Until then its port is only reserved.
        own = [i.address for i in self._addresses]
        self._port = at_end.enter_context(reserved_port(own)) if on_driver_machine else 0
        self._prober: Prober | None = None
        at_end.callback(self._close_prober)
        if not on_driver_machine:
            self._running_prober()
        run_folder = Path(config.run_folder or at_end.enter_context(process_folder()))
        self._profile = run_folder / "profile"  # the engines' IPython profile: an empty one
        self._profile.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"agent-{config.number}-", dir=run_folder))  # of this agent alone
        at_end.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._code = CodeStore(config.host, code_folder(self._folder))
        running_agents.register(self._folder, config.host)

    def _running_prober(self) -> Prober:
        if self._prober is None:
            external = [i.address for i in self._addresses if not is_loopback(i.address)]
            prober = Prober(self._config.host, self._config.keys, external, self._port)
            prober.start()  # if it cannot listen, the next probe tries again
            self._prober, self._port = prober, prober.port
        return self._prober

    def _close_prober(self) -> None:
        if self._prober is not None:
            self._prober.close()

    def _introduction(self) -> agent_messages.AgentHello | EnvironmentReported:
        """The first message of a session. While there is no environment for workers, this agent can start none."""
        if not self._environment.is_ready:
            return EnvironmentReported(self._config.host, self._environment.text)
        return agent_messages.AgentHello(
            self._config.host,
            os.getpid(),
            versions.installed(),
            self._addresses,
            self._port,
            self._home[0],
            self._protocol.workers,
            dict(self._protocol.newest),
            self._nodes.numbers,
            self._nodes.ended,
            self._reported_gpus,
            {str(w): worker.gpu for w, worker in self._workers.items() if worker.gpu},
            self._environment.packages if self._config.requirements else None,
        )

    def _check_environment(self) -> None:
        """Report how far the environment is. When it is made, the agent can start workers."""
        known, is_made = self._environment.text, self._environment.check()
        if is_made is False:
            why = f"its environment cannot be made: {self._environment.text}"
            self._carry_out([Send(agent_messages.AgentGoodbye(self._config.host, why)), End()])
        elif is_made or self._environment.text != known:
            self._link.send(self._introduction())

    def _probe(self, order: agent_messages.Probe) -> None:
        def done(reached: tuple[str, ...]) -> None:
            self._link.send(ev.Probed(self._config.host, order.target, reached, order.number))

        endpoints = [endpoint(address, order.port) for address in order.addresses]
        self._running_prober().probe(order.target, endpoints, PROBE_TIMEOUT, done)

    def _serve(self) -> bool:
        """Returns whether it has ended because no driver has sent anything."""
        pipe = [self._parent_pipe] if self._parent_pipe >= 0 else []
        check_at = sample_at = 0.0
        last = time.monotonic()
        while not self._done:
            sentinels = {worker.process.sentinel: w for w, worker in self._workers.items()}
            timeout = CHECK if self._workers or self._waiting or self._nodes.sentinels else SAMPLE
            self._turn_by = time.monotonic() + timeout
            others = (*self._environment.sentinels, *self._nodes.sentinels)
            ready = connection.wait([self._wake, *pipe, *sentinels, *others], timeout)
            now = time.monotonic()
            if now - last > timeout + SUSPENDED:
                self._continued_at = now
            last = now
            if not self._done and any(fd in ready for fd in pipe):
                return False
            if self._protocol.must_end(max(self._link.heard_at, self._continued_at), now):
                log_line(f"the driver at {self._config.driver} sends nothing any more")
                return True
            self._check_end(now)
            for sentinel in ready:
                if sentinel in sentinels:
                    self._reap(sentinels[sentinel])
            for message in self._nodes.check(now):
                self._link.send(message)
            if self._environment.sentinels:
                self._check_environment()
            self._handle_messages()
            if self._waiting:
                self._fork_waiting(now)
            if now >= check_at:
                check_at = now + CHECK
                states = {w: state_of(worker.process.pid or 0) for w, worker in self._workers.items()}
                self._carry_out(self._protocol.check_states(states, now))
            if now >= sample_at:
                sample_at = now + SAMPLE
                self._sample(now)
                self._check_cluster(now)
        return False

    def _check_end(self, now: float) -> None:
        while self._notices:
            at, notice = self._notices.popleft()  # the main thread may have waited for the template since
            notice = notice or running_agents.read_notice(self._folder)
            if notice is None:
                self._carry_out(self._protocol.terminated(at, now))
            else:
                self._carry_out(self._protocol.will_end(at + notice.within, notice.reason, now))
        self._carry_out(self._protocol.check_end(now))

    def _main_thread_runs(self) -> bool:
        """Whether the main thread, which handles messages, begins its turns in time. Called in the link's thread."""
        now = time.monotonic()
        if now - self._checked_at > self._config.heartbeat + SUSPENDED:  # the whole process was stopped
            self._turn_by = max(self._turn_by, now)
        self._checked_at = now
        late = now - self._turn_by
        if late > EXIT_AFTER:
            os.write(2, b"nbelastic: the agent hangs, and ends\n")
            os._exit(1)  # the template ends the workers
        return late <= SILENT_AFTER

    def _check_cluster(self, now: float) -> None:
        driver_lease = self._config.driver_lease
        if driver_lease is not None:
            if driver_lease.owner_has_ended:
                self._protocol.owner_ended(now)
            self._protocol.cluster_ended = driver_lease.driver is None

    def _receive(self, message: messages.Message) -> None:
        """In the link's thread: start probes here, as the main thread may wait for the template's imports; queue the rest."""
        match message:
            case agent_messages.Probe():
                self._probe(message)
                return
            case messages.Rehome(address=address, interface=interface):
                self._home = (address, interface)
                self._running_prober()
                return
        self._inbox.append(message)
        os.eventfd_write(self._wake, 1)

    def _on_notice(self, notice: Notice | None) -> None:
        """The machine will end; None: SIGTERM of a batch system, an administrator, a shutdown or `nbelastic drain`."""
        self._notices.append((time.monotonic(), notice))
        os.eventfd_write(self._wake, 1)

    def _handle_messages(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if poll.poll(0):
            os.eventfd_read(self._wake)
        while self._inbox:
            self._turn_by = time.monotonic() + MESSAGE_TIMEOUT
            match self._inbox.popleft():
                case agent_messages.StartNode() as order:
                    self._nodes.start(order, self._home, str(self._log_dir(order.log_dir)))
                case agent_messages.DeleteKeptState(by=by):
                    shutil.rmtree(kept_state_folder(self._folder, by), ignore_errors=True)
                case agent_messages.StopNode(number=number, kill=kill):
                    self._nodes.stop(number, kill=kill)
                case code_messages.StoreCode() | code_messages.CodePiece() as message:
                    for answer in self._code.handle(message):
                        self._link.send(answer)
                case message:
                    match message:  # a new driver does not know of workers that wait, and starts others
                        case agent_messages.StopWorker(worker=w):
                            self._waiting.pop(w, None)
                        case messages.NewDriver():
                            self._waiting.clear()
                    self._carry_out(self._protocol.handle(message, time.monotonic()))
        self._turn_by = time.monotonic()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self._link.send(message)
                case SendHello():
                    self._link.reset_session(self._introduction)
                case Fork(order=order) if order.gpu in self._gpus.held or self._code.is_fetching:
                    self._waiting[order.worker] = order, time.monotonic() + HELD
                case Fork(order=order):
                    self._spawn(order)
                case Signal(worker=w, kill=kill):
                    kill_group(self._workers[w].process.pid or 0, signal.SIGKILL if kill else signal.SIGTERM)
                case Harm(worker=WorkerId() as w, stop=stop):
                    self._workers[w].harm(stop=stop)
                case Harm():
                    os.kill(os.getpid(), signal.SIGKILL)
                    os._exit(1)  # the first process of a container ignores that signal
                case End():
                    self._done = True

    def _fork_waiting(self, now: float) -> None:
        """Fork workers whose GPU is free by now. If it is not in time, they may find too little memory there."""
        self._gpus.sample()
        for w, (order, until) in list(self._waiting.items()):
            if not self._code.is_fetching and (order.gpu not in self._gpus.held or now >= until):
                del self._waiting[w]
                self._spawn(order)

    def _spawn(self, order: agent_messages.Spawn) -> None:
        self._turn_by = time.monotonic() + MESSAGE_TIMEOUT  # a fork that the template refuses takes seconds
        boot = getattr(importlib.import_module(ENTRY[0]), ENTRY[1])
        (address, interface), log_dir = self._home, self._log_dir(order.log_dir)
        settings: dict[str, Any] = {
            "relay": str(self._folder),
            "worker": str(order.worker),
            "address": address,
            "interface": interface,
            "outward": next((i.name for i in self._addresses if not is_loopback(i.address)), ""),
            "log_dir": str(log_dir),
            "heartbeat": self._config.heartbeat,
            "tunnel": self._config.tunnel,
            "gpu": order.gpu,
            "profile": str(self._profile),
            "lease": self._config.lease,
            **self._config.settings,
        }
        name, log = str(order.worker), log_file(log_dir, order.worker, "err")
        try:
            process = fork(lambda: self._context.Process(target=boot, args=(settings,), daemon=False, name=name))
            self._workers[order.worker] = WorkerProcess(process, order.gpu, log)
        except ForkRefusedError as error:
            self._carry_out(self._protocol.exited(order.worker, 1, str(error)))
            return
        except psutil.NoSuchProcess:  # it has ended since start()
            self._carry_out(self._protocol.exited(order.worker, process.exitcode or 1))
            return
        self._carry_out(self._protocol.forked(order.worker, process.pid or 0))

    def _log_dir(self, driver_path: str) -> Path:
        """The log folder on this machine: elsewhere than on the driver's, one of the same name in `user_folder()`."""
        if self._config.address:
            return Path(driver_path)
        return user_folder() / "logs" / Path(self._config.log_dir).name / Path(driver_path).name

    def _reap(self, w: WorkerId) -> None:
        process = (worker := self._workers[w]).process
        process.join()
        if worker.gpu:
            self._gpus.note_ended(process.pid or 0, worker.gpu)
        self._carry_out(self._protocol.exited(w, process.exitcode or 0, worker.last_line()))
        del self._workers[w]
        process.close()

    def _sample(self, now: float) -> None:
        workers: dict[str, tuple[float, int]] = {}
        for w, worker in self._workers.items():
            with contextlib.suppress(psutil.NoSuchProcess), worker.stats.oneshot():
                workers[str(w)] = (worker.stats.cpu_percent(), worker.stats.memory_info().rss)
        cpu, memory, gpus = psutil.cpu_percent(), psutil.virtual_memory(), self._gpus.sample()
        if self._gpus.states != self._reported_gpus:
            self._reported_gpus = self._gpus.states
            self._link.send(ev.GpusReported(self._config.host, self._reported_gpus))
        host, rest = self._config.host, (memory.total, self._protocol.blocked(now), self._gpus.throttled)
        self._link.report(agent_messages.AgentSample(host, cpu, memory.used, workers, gpus, *rest))

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            kill_group(worker.process.pid or 0)
        for worker in self._workers.values():
            worker.process.join(KILL_AFTER)
            kill_group(worker.process.pid or 0)


def run(config: bytes, parent_pipe: int, environment: Environment | None = None) -> None:
    """Run the agent with this `Config` (JSON) until it must end. `parent_pipe`: a descriptor that becomes readable then, or -1."""
    Agent(msgspec.json.decode(config, type=Config), parent_pipe, environment or Environment(())).run()
