"""What people hold: a `Cluster`."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import hashlib
import itertools
import os
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from msgspec.structs import replace

from nbelastic.client.cell_syntax import check_cell
from nbelastic.client.checkpoints import Checkpoints, checkpoints
from nbelastic.client.connection import Connection, JobCopy, connected, kill_driver, taken
from nbelastic.client.driver_process import launch
from nbelastic.client.job import ANSWER, Job, outcome
from nbelastic.client.kernel_discovery import Finder
from nbelastic.client.pickled_calls import pickled
from nbelastic.client.saved_arguments import BY_CLIENTS, arguments_of, kept_arguments
from nbelastic.client.script_options import Options, script_for
from nbelastic.client.subscriptions import Watchers
from nbelastic.errors import (
    AnotherDriverError,
    ClusterStoppedError,
    DriverLostError,
    HostError,
    NbelasticError,
    UsageError,
)
from nbelastic.protocol import messages, requests, worker_messages
from nbelastic.protocol.cells import Executed
from nbelastic.protocol.hosts import parse_host
from nbelastic.protocol.limits import Limits
from nbelastic.protocol.run_directory import START, RunDir
from nbelastic.protocol.saved_cluster import ClusterInfo, Head, clusters, find, patience_for, read, sweep
from nbelastic.protocol.settings import LEASE, LINE_LEASE, SSH, Settings, check, check_kinds, timeouts_of
from nbelastic.protocol.sources import ByClients, HostDiscovery
from nbelastic.protocol.start import AT_THE_END, Start
from nbelastic.protocol.status import EventRecord, HostStatus, Status, WorkerStack, WorkerStatus
from nbelastic.provision.discovery import source_of
from nbelastic.system import pickling
from nbelastic.system.files import replace_private
from nbelastic.system.gpus import gpus
from nbelastic.system.presence import identity
from nbelastic.system.processes import leave

T = TypeVar("T")
_numbers = itertools.count(1)
CLOSING = 10.0  # seconds that all but the programs may take to end
SOON = 2.0  # seconds in which a process ends that has nothing more to do
AGAIN = 0.05  # seconds to the next try to attach, while another kernel attaches
CONTROLLER = 10.0  # seconds that ipyparallel's controller may take to start, and to know an engine
NOT_ATTACHED = "it was not attached to"
DEATHS, DEATHS_WITHIN = 3, 60.0  # drivers that this process replaces, in so many seconds
LONGEST = 1e9  # seconds that somebody may say
AT_ONCE = 2.0  # seconds for everything when the kernel ends, which leaves no more


class Cluster:
    """Elastic workers on one or more hosts, and the jobs that run on them.

    `hosts`: `"localhost:2,127.0.0.2:2"` or a list of such; by default this machine, with a slot per GPU or, without
    one, max(min, cores). `discovery` (a script's path or a `HostDiscovery`) says instead which hosts there are.
    `min` and `max` bound the world size; `spares` workers more are kept warm. Times are in seconds: below `min` for
    `elastic_timeout` ends the job (None: never), `cooldown` is the range in which a slot's pause doubles from death to death
    (`(0, 0)`: none), an agent not heard for `silence` is lost. `reset_limit` bounds the recoveries of a job (planned
    changes do not count). `backend`: auto, gloo or nccl. `preload` names modules that the workers' template imports.

    Hosts that are not this machine are started by ssh, or by `launcher`: the name of one of ipyparallel's batch launchers
    (slurm, pbs, …), with `launcher_options` for it; there, `python` names the interpreter. `env` and `cwd` are the
    agents' and workers' environment and folder. `nics` names the network interfaces to use, separated by commas; by
    default the hosts find one that reaches all. A worker that others wait for longer than `stall` is replaced.
    A program that is told to stop has `stop_timeout` seconds to write a last checkpoint. `timeouts` changes how long other
    waits may last, by the names of the table in docs/how-it-works.md: `{"recover": 30}`.

    With `keep` all but this process lives on when this process ends: `Cluster.attach` has it again from another one.
    After `lease` seconds to which nobody is attached it ends, with a last checkpoint if the job has checkpoints.

    Starts with `start()` or `with`; every call returns at once or says what it waits for.
    """

    def __init__(
        self,
        hosts: str | Sequence[str] | None = None,
        *,
        min: int = 1,  # noqa: A002
        max: int | None = None,  # noqa: A002
        discovery: str | HostDiscovery | None = None,
        slots: int | None = None,
        backend: str = "auto",
        spares: int = 0,
        elastic_timeout: float | None = 600.0,
        reset_limit: int | None = None,
        cooldown: tuple[float, float] = (5.0, 300.0),
        silence: float = 10.0,
        stall: float | None = None,
        stop_timeout: float = 60.0,
        timeouts: Mapping[str, float] | None = None,
        nics: str | None = None,
        log_dir: str | Path | None = None,
        name: str | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        launcher: str = "ssh",
        launcher_options: Mapping[str, str] | None = None,
        keep: bool = False,
        lease: float = 3600.0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        check_kinds(given)
        check(slots is None or slots >= 1, f"slots={slots}: at least 1.")
        check(hosts is None or discovery is None, "give hosts or discovery, not both.")
        self.name = name or f"nbelastic-{os.getpid()}-{next(_numbers)}"
        self._run_dir = RunDir(self.name)
        self._default_slots = slots or gpus() or builtins.max(min, os.cpu_count() or 1)
        source = source_of(discovery, hosts, slots, self._default_slots)
        self._discovery = discovery if isinstance(source, ByClients) and not isinstance(discovery, str) else None
        self._limits = Limits(
            min=min,
            max=max,
            spares=spares,
            elastic_timeout=None if elastic_timeout is None else float(elastic_timeout),
            reset_limit=reset_limit,
            cooldown=(float(cooldown[0]), float(cooldown[1])),
            silence=float(silence),
            stall=None if stall is None else float(stall),
            timeouts=timeouts_of(timeouts, stop_timeout, launcher),
        )
        self._settings = Settings(
            name=self.name,
            limits=self._limits,
            discovery=source,
            run_dir=self._run_dir.path,
            backend=backend,
            preload=tuple(preload),
            environment={name: str(value) for name, value in (env or {}).items()},
            nics=tuple(part.strip() for part in (nics or "").split(",") if part.strip()),
            python=python,
            cwd=str(cwd) if cwd is not None else None,
            launcher=launcher,
            launcher_options=dict(launcher_options or {}),
            lease=float(lease) if keep else builtins.max(LINE_LEASE if launcher == SSH else LEASE, float(silence)),
        )
        self._settings.check()
        if launcher != SSH:
            from nbelastic.provision.batch import check_options  # it imports ipyparallel, which takes its time

            check_options(launcher, self._settings.launcher_options)
        given["slots"] = self._default_slots
        self._arguments = kept_arguments(given, source)
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._driver: Connection | None = None
        self._last: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None  # the driver's, if it is a child of this one
        self._finder: Finder | None = None
        self._kept, self._own = keep, True  # if it is not kept, it ends with the kernel whose own it is
        self._deaths: deque[float] = deque(maxlen=DEATHS)  # of drivers, when
        self._watchers = Watchers(self.status)
        self._job: Job | None = None  # the last one; earlier ones are kept by who needs them
        self._client: tuple[Connection, Any] | None = None  # ipyparallel's, for `%px`, once somebody has asked for it

    # ---- life ----

    def start(self, wait: bool = True, timeout: float | None = None) -> Self:
        """Start; returns when `min` workers are ready (`wait=False`: at once). Ctrl-C leaves it starting.

        UsageError if it runs already, or another cluster of that name. HostError if `min` workers need more open files than
        a process may have here, or if no host could be started; the cluster has stopped then. WaitTimeoutError after
        `timeout` seconds (default: elastic_timeout) and ClusterStoppedError, both with the reason.
        """
        if self._driver is not None and not self._driver.finished.is_set():
            raise UsageError(f"the cluster {self.name!r} is running already.")
        if self.died:
            self.close()
        log_dir = (self._log_dir or self._run_dir.log_dir()).absolute()
        submitted = self._last.submitted if self._last is not None else 0
        owner = "" if self._kept else identity(os.getpid())
        settings = replace(self._settings, log_dir=log_dir, number=secrets.token_hex(4), owner=owner)
        self._own = True
        self._take(self._launch(Start(settings, self._arguments, submitted=submitted)))
        if wait:
            low = self._limits.min
            limit = self._limits.elastic_timeout if timeout is None else timeout
            try:
                self._ask(requests.WaitForStart(low), limit, f"{low} ready workers", cancel=True)
            except HostError:
                self.stop()
                raise
        return self

    def _launch(self, start: Start, before: Connection | None = None) -> Connection:
        connection, child = launch(start, self._run_dir.path, self._watchers.changed, before)
        leave(child)  # it may outlive this process
        self._process = child
        return connection

    def _take(self, driver: Connection) -> None:
        self._forget()
        _running[self.name] = self
        self._use(driver)

    def _use(self, driver: Connection) -> None:
        """From now on."""
        self._driver = self._last = driver
        client = self._client
        if client is not None:  # ipyparallel's controller outlives the driver
            self._client = driver, client[1]
        driver.use(self._changed, partial(self._replace, driver))
        self._find(driver)
        self._changed()

    def _find(self, driver: Connection) -> None:
        """Hosts come from an object of this kernel's, unless somebody has said since that they come from elsewhere."""
        source, heard = self._settings.discovery, driver.arguments.get(BY_CLIENTS)
        if self._finder is not None:
            self._finder.stop()
        if self._discovery is not None and isinstance(source, ByClients) and source.key == heard:
            self._finder = Finder(self._discovery, source.key, driver)

    def _replace(self, dead: Connection) -> Connection | None:
        """In the thread of the connection to a driver that has died: connect to the next one, which a kernel starts.

        None if the cluster is stopped or left here, has ended, or if its drivers die again and again.
        """
        why, tries = f"its log in {dead.log_dir} may say why", 0
        while self._driver is dead:
            now = time.monotonic()
            often = len(self._deaths) == DEATHS and now - self._deaths[0] < DEATHS_WITHIN
            if tries == DEATHS:
                dead.why_ended += f", and {DEATHS} others could not take its place: {why}"
                break
            if often:
                dead.why_ended += f", {DEATHS + 1} times in {now - self._deaths[0]:.0f} s, and is not replaced again before somebody attaches: {why}"
                break
            self._deaths.append(now)
            tries += 1
            try:
                heir = self._next_driver(dead)
            except HostError as error:  # that one has died as well, or cannot start
                why = str(error)
            except (NbelasticError, OSError) as error:
                dead.why_ended += f", and no other one could take its place: {error}"
                break
            else:
                if self._driver is dead:
                    self._use(heir)
                return heir
        return None

    def _next_driver(self, dead: Connection) -> Connection:
        """The first of the kernels that have lost a driver starts the next one, the others connect to it.

        UsageError if the cluster has ended meanwhile, or another one has its name.
        """
        folder = self._run_dir.path

        def next_one() -> Connection:
            patience = patience_for(folder)
            heir = connected(folder, patience, dead)
            if heir is not None:
                return heir
            saved = read(folder, Head)
            if saved.number != dead.number:
                raise taken(self.name)
            newest = self
            if saved.arguments != self._arguments:  # another kernel has attached, and said where hosts come from
                with contextlib.suppress(UsageError):  # that is not there any more
                    newest = self._told(self.name, saved.log_dir, saved.arguments)
            return self._launch(newest._start_again(patience), dead)

        return _unless_another_starts_one(next_one)

    def _start_again(self, patience: float) -> Start:
        return Start(self._settings, self._arguments, found=True, patience=patience)

    def _changed(self) -> None:
        """In the thread of the connection."""
        if self._last is not None and self._last.finished.is_set() and self._finder is not None:
            self._finder.stop()
        self._watchers.changed()

    @classmethod
    def attach(cls, name: str | None = None, discovery: str | HostDiscovery | None = None) -> Self:
        """Connect to a cluster of this machine, also from several kernels at once: all see the same, and may give orders.

        `name` (or its run folder) can be left out if only one is kept. Its job comes back as `job`, with what it has
        printed. If its driver has died, another one is started; a training goes on undisturbed. `discovery`: where hosts
        come from, if that was an object of your own; without it the hosts stay as they are. UsageError, in one line, for a
        cluster that is not there, not yours, damaged, of another version, or whose driver does not answer.
        """
        return _unless_another_starts_one(partial(cls._of, find(name), discovery))

    @classmethod
    def _of(cls, folder: Path, discovery: str | HostDiscovery | None) -> Self:
        """Connected to its driver or, if that is dead, to a new one, which takes over what it has left."""
        patience = patience_for(folder)
        driver = connected(folder, patience)
        if driver is None:
            saved = read(folder, Head)
            self = cls._told(folder.name, saved.log_dir, saved.arguments, discovery)
            self._own = False
            self._take(self._launch(self._start_again(patience)))
            return self
        try:
            self = cls._told(folder.name, str(driver.log_dir), driver.arguments, discovery)
        except BaseException:
            driver.leave(NOT_ATTACHED)
            raise
        self._own = False
        self._take(driver)
        try:
            if discovery is not None:
                self._ask(requests.Discover(self._settings.discovery, self._arguments))
                heard = self._running()  # another driver, if this one died meanwhile
                heard.arguments = self._arguments
                self._find(heard)
        except BaseException:
            self._let_go(NOT_ATTACHED)
            raise
        return self

    @classmethod
    def _told(
        cls, name: str, log_dir: str, arguments: Mapping[str, Any], discovery: str | HostDiscovery | None = None
    ) -> Self:
        """As it was started. Where hosts came from an object of another kernel's, they stay as they are."""
        self = cls(**arguments_of(name, log_dir, arguments, discovery))
        if discovery is None and arguments.get(BY_CLIENTS):
            self._settings, self._arguments = (
                replace(self._settings, discovery=ByClients(arguments[BY_CLIENTS])),
                dict(arguments),
            )
        return self

    @staticmethod
    def all() -> list[ClusterInfo]:
        """Your clusters on this machine: with a driver, or waiting for another one."""
        return clusters()

    def close(self) -> None:
        """End with the kernel: detach a cluster that is kept, or another kernel's; stop any other.

        One whose driver has died, and was not replaced, is killed.
        """
        if self._driver is None or self._driver.finished.is_set():
            if self.died and self._own and not self._kept:
                self._kill()
            self._forget()
        elif self._own and not self._kept:
            self._stop(AT_THE_END, AT_ONCE - AT_THE_END, kill=False)  # a slow driver ends soon after the kernel
        else:
            self.detach()

    def detach(self) -> None:
        """Let go of a cluster that is kept, or another kernel's: it lives on, for `attach`. UsageError for one that is not.

        Also of one whose driver has died, and was not replaced.
        """
        if self.died:
            self._forget()
            return
        self._running()
        check(self._kept or not self._own, f"the cluster {self.name!r} is not kept: start it with keep=True.")
        self._let_go(f"the cluster {self.name!r} was detached: attach to it again")

    def _let_go(self, why: str) -> None:
        driver, self._driver = self._driver, None
        while driver is not None:
            driver.leave(why)
            driver.abandon_jobs()
            driver = driver.heir  # if it has died just before
        self._driver = None
        self._forget()

    def _forget(self) -> None:
        """The kernel's end no longer concerns this cluster."""
        if self._last is not None and self._last.forked:
            return  # all of it is the parent's
        self._close_client()
        if self._finder is not None:
            self._finder.stop()
            self._finder = None
        if _running.get(self.name) is self:  # another one may have taken the name
            del _running[self.name]
        self._watchers.changed()

    def _close_client(self) -> None:
        held, self._client = self._client, None
        if held is not None:
            held[1].close()

    def stop(self, timeout: float | None = None, by: str = "hand") -> None:
        """Stop the job, the workers and everything else that was started. Stopping twice is fine.

        Programs have `timeout` seconds (default: `stop_timeout`) to write a last checkpoint and end. Ctrl-C kills them at once.
        """
        check(timeout is None or 0 <= timeout <= LONGEST, f"timeout={timeout}: a number of seconds, at least 0.")
        self._stop(self._limits.timeouts.stop if timeout is None else timeout, CLOSING, by=by)

    def _stop(self, within: float, more: float, *, by: str = "hand", kill: bool = True) -> None:
        """Programs have `within` seconds to end, and the rest `more` seconds after that; then, to `kill`, the driver ends."""
        driver, self._driver = self._driver, None
        if driver is None or driver.forked:
            return
        try:
            self._end(driver, requests.Stop(by, within), more, kill=kill)
        except KeyboardInterrupt:
            self._end(driver, requests.Stop(by, 0.0), more, kill=kill)
            raise
        finally:
            self._forget()

    def _end(self, driver: Connection, stop: requests.Stop, more: float, *, kill: bool) -> None:
        patience = (stop.within or 0.0) + more
        driver.request(stop)
        driver.finished.wait(patience)
        if not driver.finished.is_set() and kill:
            kill_driver(self._run_dir, self._run_dir.driver)
            driver.finished.wait(more)
        for _ in range(DEATHS):
            if not driver.died:
                break
            # The kernel's end leaves no time for another one.
            heir = driver.heir or (self._heir_of(driver) if kill else None)
            if heir is None:
                self._kill()
                break
            self._last = driver = heir
            heir.use(self._changed)
            heir.request(stop)
            heir.finished.wait(patience)
        if self._process is not None and driver.finished.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SOON)

    def _kill(self) -> None:
        """End what a dead driver has left on this machine, if no other driver has taken it over."""
        if self._last is not None:
            sweep(self.name, self._last.number, kill=True)

    def _heir_of(self, dead: Connection) -> Connection | None:
        """A driver that can stop what this one has left."""
        with contextlib.suppress(NbelasticError, OSError):
            return self._next_driver(dead)
        return None

    def request_stop(self, by: str = "you") -> None:
        """Begin to stop and return at once; `stop()` waits for the end. After it, the cluster can be started again."""

        def again(asked: Future[Any]) -> None:
            if isinstance(asked.exception(), DriverLostError):
                with contextlib.suppress(NbelasticError):
                    self.request_stop(by)

        self._running().request(requests.Stop(by)).add_done_callback(again)

    def __enter__(self) -> Self:
        started = self._driver is not None and not self._driver.finished.is_set()
        return self if started else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- jobs ----

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int | None = None,
        **kwargs: Any,
    ) -> Job:
        """Run `function(*args, **kwargs)` on every worker, newcomers included; returns at once.

        With the folder `checkpoint` the state begins as the newest checkpoint in it that can be used, and is saved there
        every `checkpoint_every` commits (100) and at the end; the last `checkpoint_keep` (3) stay.
        UsageError if a job runs already, if the function cannot be sent, or for wrong arguments.
        """
        plan = checkpoints(checkpoint, checkpoint_every, checkpoint_keep)
        return self._submit_program(plan, pickle=lambda: pickled(function, args, kwargs))

    def run_cell(
        self,
        source: str,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int | None = None,
    ) -> Job:
        """Run a notebook cell on every worker, newcomers included; returns at once. The rest is as in `run`.

        SyntaxError, before anything is sent.
        """
        check_cell(source, awaits=False)
        return self._submit_program(checkpoints(checkpoint, checkpoint_every, checkpoint_keep), source)

    def run_script(self, path: str | os.PathLike[str], *args: Any, **options: Unpack[Options]) -> Job:
        """Run an unmodified torchrun script on every host, with a worker a slot; returns at once.

        Options, with torchrun's meanings: `module=False`, `no_python=False`, `max_restarts=0`, `monitor_interval=0.1`,
        `nproc=None` (workers a host instead of its slots), `role="default"`, `redirects="0"`, `tee="0"`, and `env`,
        `exit_barrier_timeout=300`, `shutdown_timeout=30` (seconds). `cold=True` starts fresh interpreters instead of
        forks. A change of the hosts restarts all workers, as does one that fails, up to `max_restarts` times.
        UsageError if a job runs already, or for what cannot be.
        """
        script, terms = script_for(path, args, options, self._settings)
        return self._submit(requests.SubmitScript(script, terms))

    def connection_file(self, host: str | None = None) -> Path:
        """The file (0600) with which a terminal's torchrun joins: `--rdzv-backend=nbelastic --rdzv-endpoint=<file>`.

        It is for terminals of this machine; with a `host` (a name that ssh knows, or an address), for one there, to which
        it has to be copied (`scp -p`). It holds the cluster's keys, and is of no use after its stop. HostError if it
        cannot be made.
        """
        there = parse_host(host, 1) if host is not None else None
        return Path(self._ask(requests.MakeConnectionFile(there), None, "the cluster file"))

    def _submit_program(
        self, plan: Checkpoints, source: str = "", pickle: Callable[[], list[memoryview]] | None = None
    ) -> Job:
        """UsageError, and no job, if a job runs already or if this one cannot be pickled or saved."""
        self._refuse_if_running()  # before anything is pickled; the driver has the last word
        call = self._saved(pickle()) if pickle is not None else None
        try:
            return self._submit(requests.Submit(worker_messages.Program("", "", plan, source, call)))
        except BaseException:
            if call is not None and call.path:
                Path(call.path).unlink(missing_ok=True)
            raise

    def _saved(self, call: list[memoryview]) -> messages.Blob:
        """In a file, which the next driver finds. UsageError if that is full."""
        size = pickling.size(call)
        path = self._run_dir.path / f"{secrets.token_hex(8)}.program"
        try:
            replace_private(path, call)
        except OSError as error:
            raise requests.not_saved(f"job-{self._running().submitted + 1}", path.parent, error) from None
        return messages.Blob(size, path=str(path))

    def _submit(self, request: requests.Submit | requests.SubmitScript) -> Job:
        driver = self._running()
        name = self._ask(request, ANSWER, "the driver to take the job in")
        self._job = self._job_of(driver.jobs[name])
        return self._job

    def _refuse_if_running(self) -> None:
        driver = self._running()
        if driver.faulty:
            raise ClusterStoppedError(f"{driver.faulty}.")
        requests.refuse_second_job(driver.present_job)

    def execute(
        self, source: str, *, setup: bool = False, key: str | None = None, timeout: float | None = None
    ) -> list[Executed]:
        """Run a cell on every ready worker and wait. `setup`: also on every worker that joins later, before its program.

        Returns a list of (worker, stdout, stderr, error); the error is the remote traceback, or None. A setup cell is kept if
        it succeeds on a worker. It replaces the one with the same `key` or, failing that, the same source. A worker on which
        it fails takes part in no job until the cell is mended or cleared. UsageError while a job or another setup cell runs.
        SyntaxError before anything is sent, if the cell cannot be compiled.
        """
        check_cell(source, awaits=True)
        digest = hashlib.sha256(source.encode()).hexdigest()
        run = requests.ExecuteSetup(key or f"cell-{digest[:8]}", source) if setup else requests.Execute(source)
        # A setup cell is kept if it succeeds later.
        rows: list[Executed] = self._ask(run, timeout, "the cell to end", cancel=not setup)
        return rows

    @property
    def setup_cells(self) -> dict[str, str]:
        """The sources of the setup cells by their keys, in the order in which a worker runs them."""
        return dict(self._running().setup)

    def clear_setup(self, key: str | None = None) -> None:
        """Forget the setup cell with this key, or all of them: later workers do not run them. UsageError for an unknown key."""
        if key == "":
            raise UsageError("there is no setup cell ''; without a key all are cleared.")
        self._ask(requests.ClearSetup(key or ""))

    @property
    def job(self) -> Job | None:
        """The current or last job, whoever has begun it."""
        newest = next(reversed(list(self._last.jobs.values())), None) if self._last is not None else None
        if newest is not None and (self._job is None or self._job.name != newest.name):
            self._job = self._job_of(newest)
        return self._job

    def _job_of(self, copy: JobCopy) -> Job:
        def driver() -> Connection:
            assert self._last is not None
            return self._last

        return Job(driver, copy)

    def stop_job(self, by: str = "you") -> None:
        """Stop the running job, if there is one."""
        self._ask(requests.StopJob(by, self._running().present_job))

    # ---- orders: they return when the driver has taken them in ----

    def add_host(self, host: str, by: str = "you") -> None:
        """Add `name`, `name:slots` or `user@name:slots`; a host that is there gets these slots and is pardoned."""
        self._ask(requests.AddHost(by, parse_host(host, self._default_slots)))

    def remove_host(self, host: str, now: bool = False, by: str = "you") -> None:
        """Its workers leave at the next commit (`now`: at once). UsageError if there is no such host."""
        self._ask(requests.RemoveHost(by, host, now))

    def scale(self, min: int | None = None, max: int | None = None, by: str = "you") -> None:  # noqa: A002
        """Change the bounds of the world size; what is not given stays."""
        self._ask(requests.Scale(by, min, max))

    def restart(self, worker: str, by: str = "you") -> None:
        """Kill this worker (its id, as `localhost/0#1`) and start another in its place; no strike against its slot.

        A world that it is in heals as from any death. UsageError if there is no such worker, or if the training state
        would be lost with it.
        """
        self._ask(requests.Restart(by, worker))

    def order(self, message: Mapping[str, Any], by: str) -> None:
        """Take an order as the dashboard sends it; what becomes of it is in `status().orders`, a refusal in `events` too.

        ClusterStoppedError if the cluster does not run.
        """
        driver = self._running()
        if driver.died:
            raise DriverLostError(f"{driver.why_ended}; another one takes over: order again.")
        driver.request(requests.Press(by, dict(message), self._default_slots))

    # ---- looking on ----

    @property
    def died(self) -> bool:
        """Whether the cluster is lost here because its driver has died and was not replaced. It lives on for its lease."""
        driver = self._last
        return driver is not None and driver.finished.is_set() and driver.died and driver.heir is None

    def wait(self, world: int, timeout: float = 60.0) -> Status:
        """Wait until `world` workers run in one world (or, with no job, are ready). WaitTimeoutError says for what."""
        status: Status = self._ask(requests.WaitForWorld(world), timeout, f"a world of {world}", cancel=True)
        return status

    def status(self) -> Status:
        """A frozen snapshot, at any time."""
        driver = self._driver or self._last
        if driver is None:
            limits = self._limits
            reason = "not started"
            return Status(self.name, "finished", reason, 0, 0, limits.min, limits.max, (), (), None, "")
        return driver.status

    @property
    def hosts(self) -> tuple[HostStatus, ...]:
        return self.status().hosts

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        return self.status().workers

    @property
    def events(self) -> list[EventRecord]:
        """The event log so far."""
        return self.numbered_events()[0]

    def numbered_events(self) -> tuple[list[EventRecord], int]:
        """The events that are kept, and how many there have been in all."""
        driver = self._driver or self._last
        return driver.events() if driver is not None else ([], 0)

    def stacks(self, timeout: float = 2.0) -> list[WorkerStack]:
        """Where every worker is at this moment: the Python stack of its main thread, taken by another one of its threads.

        Who has not answered after `timeout` seconds has no text: its process is stopped, or C code holds the interpreter.
        """
        stacks: list[WorkerStack] = self._ask(requests.ShowStacks(timeout), None, "stacks")
        return stacks

    def ask_stacks(self, done: Callable[[list[WorkerStack]], object], timeout: float = 2.0) -> None:
        """The same without waiting: `done(stacks)` is called in another thread, and must not wait."""
        asked = self._running().request(requests.ShowStacks(timeout))
        asked.add_done_callback(lambda future: done([] if future.exception() else future.result()))

    def trace(self) -> dict[str, Any]:
        """The event log as Chrome trace JSON: write it into a file and open that in Perfetto."""
        from nbelastic.client.trace import trace

        return trace(self.events, self.name)

    @property
    def log_dir(self) -> Path | None:
        """Where the logs of the present (or last) start are."""
        driver = self._driver or self._last
        return driver.log_dir if driver is not None else self._log_dir

    @property
    def client(self) -> Any:
        """ipyparallel's client, for what it can do beside us. It knows all ready workers that the controller has met in 10 s.

        It is made when it is asked for first. ClusterStoppedError if the cluster does not run.
        """
        driver = self._running()
        found: requests.ControllerFound
        found = self._ask(requests.FindController(), CONTROLLER, "ipyparallel's controller", cancel=True)
        if self._client is None or self._client[0] is not driver:
            self._close_client()
            from nbelastic.ipp.client import connect  # it imports ipyparallel, which takes its time

            self._client = driver, connect(found.information, self.name, str(self._run_dir.path / "ipython"))
        client = self._client[1]
        client.wait_for(found.engines, CONTROLLER)
        return client

    def subscribe(self, callback: Callable[[Status], object]) -> Callable[[], None]:
        """Have `callback(status)` called after changes, at most 4 times a second, from another thread. Returns the undoing."""
        return self._watchers.add(callback)

    def show_again(self) -> None:
        """Have those who subscribed called soon, whether or not something has changed."""
        self._watchers.changed()

    def dashboard(self) -> Any:
        """The widget (needs a notebook to be seen in)."""
        import importlib

        return importlib.import_module("nbelastic.notebook.dashboard").Dashboard(self)

    def __repr__(self) -> str:
        status = self.status()
        return f"<Cluster {self.name}: {status.phase}, {len(status.workers)} workers on {len(status.hosts)} hosts>"

    # ---- waiting ----

    def _running(self) -> Connection:
        driver = self._driver
        # A driver whose cluster is stopped still closes what it opened, and takes in nothing any more.
        if driver is None or driver.finished.is_set() or driver.status.phase == "finished":
            why = self._last.why_ended if self._last is not None else ""
            cure = "attach to it" if self.died and (self._kept or not self._own) else "start it"
            raise ClusterStoppedError(f"the cluster {self.name!r} is not running{f' ({why})' if why else ''}: {cure}.")
        return driver

    def _ask(
        self,
        request: requests.AnyRequest,
        timeout: float | None = ANSWER,
        what: str = "the driver",
        *,
        cancel: bool = False,
    ) -> Any:
        """The driver's answer, or its error; WaitTimeoutError says `what` was waited for. `cancel`: nobody wants it later."""
        driver, begun = self._running(), time.monotonic()
        future = driver.request(request)
        try:
            return outcome(future, timeout, lambda: f"{what}: {driver.status.reason}")
        except DriverLostError:
            if not isinstance(request, requests.REPEATABLE):
                raise
        finally:
            if cancel:
                future.cancel()
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        return self._ask(request, left, what, cancel=cancel)


def _unless_another_starts_one(attempt: Callable[[], T]) -> T:
    """What `attempt()` gives, made again while another kernel starts the driver at the same moment."""
    end = time.monotonic() + START
    while True:
        try:
            return attempt()
        except AnotherDriverError:
            if time.monotonic() > end:
                raise
            time.sleep(AGAIN)


_running: dict[str, Cluster] = {}


def _stop_all() -> None:
    """At the kernel's end: nothing of ours stays but what is kept. (A killed kernel is noticed by the driver.)"""
    for cluster in list(_running.values()):
        with contextlib.suppress(Exception):  # it ends at this moment; and no thread can be started any more
            cluster.close()


atexit.register(_stop_all)
