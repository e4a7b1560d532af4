"""The class `Cluster`: what users start, train on, watch and change."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

from nbelastic.client.attaching import attach_cluster
from nbelastic.client.cell_syntax import cell_request, check_cell
from nbelastic.client.checkpoints import checkpoint_plan
from nbelastic.client.cluster_view import ClusterView
from nbelastic.client.configuration import configure
from nbelastic.client.debugging import debug
from nbelastic.client.driver_link import DriverLink
from nbelastic.client.engine_client import EngineClient
from nbelastic.client.find_driver import retry_while_another_starts
from nbelastic.client.imported_names import names_in_text
from nbelastic.client.job import Job
from nbelastic.client.job_copy import JobCopy
from nbelastic.client.kernel_end import close_at_kernel_end, do_not_close_at_kernel_end
from nbelastic.client.pickled_calls import pickle_call
from nbelastic.client.pushed_values import push
from nbelastic.client.script_options import ScriptOptions, script_request
from nbelastic.client.stopping import close_cluster, detach_cluster, request_stop, stop_cluster, stopped_on_error
from nbelastic.client.submission import submit, submit_call, submit_cell, swap_call, swap_cell
from nbelastic.client.subscriptions import Subscriptions
from nbelastic.errors import DriverLostError, HostError, UsageError
from nbelastic.protocol import requests
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.host_sources import HostDiscovery
from nbelastic.protocol.local_clusters import ClusterInfo, clusters, find_run_folder
from nbelastic.protocol.requests import CellOutput, CommitOutput, Piece
from nbelastic.system.argument_types import WHOLE, check_kind


class Cluster(ClusterView):
    """Elastic workers on one or more hosts, and the jobs that run on them.

    `hosts`: `"localhost:2,127.0.0.2:2"` or a list of such texts. The default is this machine, with one slot per GPU or,
    without a GPU, max(min, cores) slots. `discovery`, a script's path or a `HostDiscovery`, lists the hosts instead.
    `min` and `max` bound the world size; `spares` more workers are kept ready. Times are in seconds. A job ends after
    `elastic_timeout` below `min` (None: never). `cooldown` is the range in which a slot's back-off doubles from failure to
    failure (`(0, 0)`: no back-off). An agent that is unresponsive for `silence` is lost. `reset_limit` bounds the recoveries
    of a job; reconfigurations do not count. `backend`: auto, gloo or nccl. The workers' template imports the modules in
    `preload`.

    ssh starts the hosts that are not this machine, or else `launcher` does: the name of one of ipyparallel's batch launchers
    (slurm, pbs, …), with its `launcher_options`; there, `python` names the interpreter. `env` and `cwd` are the environment and
    working folder of agents and workers. `nics` names the network interfaces to use, separated by commas; by default the
    hosts find one that reaches all. A worker that others wait for longer than `stall` is replaced. `exclude_differing`: the host
    of a rank is left out if its training state changes to other values than the others'. On a stop, a program has `stop_timeout`
    seconds for a last checkpoint. `timeouts` sets other waits by their names in docs/reference.md: `{"recover": 30}`.

    `code_sync`: before each job and cell, hosts get the modules of the working folder and of `code_folders` that are imported
    here, if they lack them. Workers import changed ones again. `requirements`, a file or its lines: each host makes an environment.

    With `keep` the cluster outlives this process; `Cluster.attach` connects to it from another one. After `lease` seconds
    without a client it ends, with a last checkpoint if the job has checkpoints. `metrics_port`: serve OpenMetrics on this
    port of 127.0.0.1, beside the socket in the run folder. `chaos`: allow `chaos()` to inject faults.

    `start()` or `with` starts the cluster. Each call returns at once, or its text says what it waits for.
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
        exclude_differing: bool = False,
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
        metrics_port: int | None = None,
        code_sync: bool = True,
        code_folders: Sequence[str] = (),
        requirements: str | Path | Sequence[str] | None = None,
        chaos: bool = False,
    ) -> None:
        configuration = configure({name: value for name, value in locals().items() if name != "self"})
        self.name = configuration.settings.name
        self._subscriptions = Subscriptions(self.status)
        self._link = DriverLink(configuration, self._subscriptions.notify, self._handle_release)
        self._job: Job | None = None  # the newest; earlier ones live as long as the user holds them
        self._engines = EngineClient(self._link)

    # ---- start and stop ----

    def start(self, wait: bool = True, timeout: float | None = None) -> Self:
        """Start; return when `min` workers are ready (`wait=False`: at once). Ctrl-C ends the wait, not the start.

        UsageError if this cluster, or another one of that name, runs already. HostError if `min` workers need more open files
        than a process may have here, or if no host could be started; then the cluster has stopped. WaitTimeoutError after
        `timeout` seconds (default: elastic_timeout) and ClusterStoppedError, both with the reason.
        """
        if self._link.is_connected:
            raise UsageError(f"the cluster {self.name!r} is running already.")
        if self.died:
            self.close()
        self._link.start()
        close_at_kernel_end(self)
        if wait:
            try:
                self._link.wait_for_start(timeout)
            except HostError:
                self.stop(by="itself, as no host could be started")
                raise
        return self

    @classmethod
    def attach(cls, name: str | None = None, discovery: str | HostDiscovery | None = None) -> Self:
        """Connect to a cluster on this machine. Several kernels may attach: all see the same and may change it.

        `name` (or the cluster's run folder) can be left out if only one cluster is kept. Its job comes back as `job`, with what
        it has printed. If the driver has died, another one is started; a training goes on undisturbed. `discovery` replaces
        the cluster's own. If that is an object of a kernel that has ended, the hosts stay as they are without it. UsageError,
        in one line, for a cluster that is not there, not yours, damaged, of another version, or whose driver does not answer.
        """
        cluster = retry_while_another_starts(partial(attach_cluster, cls, find_run_folder(name), discovery))
        close_at_kernel_end(cluster)
        return cluster

    @staticmethod
    def all() -> list[ClusterInfo]:
        """Your clusters on this machine, with a driver or waiting for one."""
        return clusters()

    def close(self) -> None:
        """Act as at the kernel's end: detach a cluster that is kept or that another kernel started, stop any other.

        A cluster whose driver has died and was not replaced is killed.
        """
        close_cluster(self._link)

    def detach(self) -> None:
        """Leave a cluster that is kept, or that another kernel started: it lives on, and can be attached to.

        UsageError for any other cluster, unless its driver has died and was not replaced.
        """
        detach_cluster(self._link)

    def _handle_release(self) -> None:
        """Run by the link when this process leaves the cluster."""
        self._engines.close()
        do_not_close_at_kernel_end(self)
        self._subscriptions.notify()

    def stop(self, timeout: float | None = None, by: str = "hand") -> None:
        """Stop the job, the workers and everything else that was started. Stopping twice is fine.

        Programs have `timeout` seconds (default: `stop_timeout`) to write a last checkpoint and end. Ctrl-C kills them at once.
        """
        stop_cluster(self._link, timeout, by=by)

    def request_stop(self, by: str = "you") -> None:
        """Begin to stop and return at once; `stop()` waits for the end. After that, the cluster can be started again."""
        request_stop(self._link, by)

    def __enter__(self) -> Self:
        with stopped_on_error(self._link):
            return self if self._link.is_connected else self.start()

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
        swap: bool = False,
        **kwargs: Any,
    ) -> Job:
        """Run `function(*args, **kwargs)` on every worker, newcomers included; returns at once.

        With the folder `checkpoint` the training state is loaded from the newest usable checkpoint in it. It is saved there
        every `checkpoint_every` commits (100) and at the end; the last `checkpoint_keep` (3) are kept.
        UsageError if a job runs already, if the function cannot be sent, or for wrong arguments.

        `swap`: replace the program of the job that runs, and return when this one has made its first commit. Between two steps
        it takes over the training state, by name. JobError if it fails before that commit: the old program goes on.
        """
        checkpoints = checkpoint_plan(checkpoint, checkpoint_every, checkpoint_keep)
        pickle = partial(pickle_call, function, args, kwargs)
        return self._hold((swap_call if swap else submit_call)(self._link, pickle, checkpoints))

    def run_cell(
        self,
        source: str,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int | None = None,
        swap: bool = False,
    ) -> Job:
        """Run a notebook cell on every worker, newcomers included; returns at once. Checkpoints and `swap` are as in `run`.

        SyntaxError, before anything is sent, if the cell cannot be compiled.
        """
        check_cell(source, awaits=False)
        checkpoints = checkpoint_plan(checkpoint, checkpoint_every, checkpoint_keep)
        return self._hold((swap_cell if swap else submit_cell)(self._link, source, checkpoints))

    def run_script(self, path: str | os.PathLike[str], *args: Any, **options: Unpack[ScriptOptions]) -> Job:
        """Run an unmodified torchrun script on every host, with one worker per slot; returns at once.

        Options, with torchrun's meanings: `module=False`, `no_python=False`, `max_restarts=0`, `monitor_interval=0.1`,
        `nproc=None` (workers per host, instead of its slots), `role="default"`, `redirects="0"`, `tee="0"`, and `env`,
        `exit_barrier_timeout=300`, `shutdown_timeout=30` (seconds). `cold=True` starts new interpreters instead of
        forks. A change of the hosts restarts all workers, as does a worker that fails, up to `max_restarts` times.
        UsageError if a job runs already, or for wrong options.
        """
        return self._hold(submit(self._link, script_request(path, args, options, self._link.configuration.settings)))

    def connection_file(self, host: str | None = None) -> Path:
        """The file (0600) with which a terminal's torchrun joins: `--rdzv-backend=nbelastic --rdzv-endpoint=<file>`.

        It is for terminals on this machine or, with `host` (a name that ssh knows, or an address), on that host; copy it there
        (`scp -p`). It holds the cluster's keys, and becomes useless when the cluster stops. HostError if it cannot be made.
        """
        spec = parse_host(host, 1) if host is not None else None
        return Path(self._link.ask(requests.MakeConnectionFile(spec), None, "the connection file"))

    def _hold(self, copy: JobCopy) -> Job:
        self._job = Job(self._link.last_connection, copy, self._subscriptions.has_any)
        return self._job

    @overload
    def execute(
        self,
        source: str,
        *,
        setup: bool = False,
        key: str | None = None,
        timeout: float | None = None,
        on_output: Callable[[list[Piece]], object] | None = None,
    ) -> list[CellOutput]: ...

    @overload
    def execute(
        self,
        source: str,
        *,
        at_commit: Literal[True],
        ranks: Sequence[int] = (),
        limit: float = 30.0,
        timeout: float | None = None,
        on_output: Callable[[list[Piece]], object] | None = None,
    ) -> list[CommitOutput]: ...

    def execute(
        self,
        source: str,
        *,
        setup: bool = False,
        key: str | None = None,
        timeout: float | None = None,
        at_commit: bool = False,
        ranks: Sequence[int] = (),
        limit: float = 30.0,
        on_output: Callable[[list[Piece]], object] | None = None,
    ) -> list[CellOutput] | list[CommitOutput]:
        """Run a cell on every ready worker and wait. `setup`: also on every worker that joins later, before its program.

        Returns a list of (worker, stdout, stderr, error); the error is the remote traceback, or None. While the cell runs,
        `on_output(pieces)` is called ten times per second with what it has just printed and displayed, as `Piece`s. Ctrl-C, and
        the end of `timeout`, interrupt the cell on the workers, which stay. A setup cell goes on after `timeout`, and is kept
        if it succeeds on a worker. It replaces the one with the same `key` or, without a key, the same source. A worker on
        which it fails takes part in no job until it is corrected or cleared. UsageError while a job or another setup cell runs.

        `at_commit`: in the middle of the running program, on `ranks` (default: all). The ranks stop together after a step,
        run the cell, and train on. It sees the program's names, with `state`; what it changes on all ranks is trained on with.
        An error in it ends nothing; after `limit` seconds it is interrupted. Returns a list of `CommitOutput`. UsageError if no
        job trains. SyntaxError, before anything is sent, if the cell cannot be compiled.
        """
        request = cell_request(source, setup=setup, key=key, at_commit=at_commit, ranks=ranks, limit=limit)
        if not at_commit:
            self._link.send_code(names_in_text(source))
        outputs: list[CellOutput] | list[CommitOutput] = self._link.ask(
            request, timeout, "the cell to end", cancel=not setup, on_pieces=on_output
        )
        return outputs

    def push(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Set variables in the namespace of every worker, also of those that join later: `push(data=data, lr=0.1)`.

        Cells, `%%elastic_run` programs and functions find them there. The values are pickled once; on this machine the
        workers map them, and share the memory of arrays that they only read. The newest value of a name counts.
        UsageError while a job or a setup cell runs, for a value that cannot be pickled, or if a worker cannot take them.
        """
        push(self._link, {**(values or {}), **named})

    def pause(self, timeout: float | None = 60.0, by: str = "you") -> None:
        """Stop the training at its next commit, and wait until all ranks stand still. Cells can run there: see `execute`.

        A world that breaks meanwhile is formed again, makes one commit and is paused again. UsageError if no job runs.
        """
        self._link.ask(requests.Pause(by), timeout, "all ranks to come to the next commit")

    def resume(self, by: str = "you") -> None:
        """Let a paused training go on. UsageError if no job runs."""
        self._link.ask(requests.Resume(by))

    def step(self, steps: int = 1, timeout: float | None = None, by: str = "you") -> None:
        """Let a paused training make so many commits, and wait until it is paused again. One that runs is paused."""
        check_kind("steps", steps, WHOLE)
        if steps < 1:
            raise UsageError(f"steps={steps}: at least 1.")
        self._link.ask(requests.Step(by, steps), timeout, f"all ranks to make {steps} commits")

    def debug(self, rank: int | None = None, timeout: float | None = None) -> None:
        """Wait for a `breakpoint()` of this rank, or of any, and pass your lines to pdb there until the program goes on (`c`)."""
        debug(self._link, rank, timeout)

    @property
    def setup_cells(self) -> dict[str, str]:
        """The sources of the setup cells by their keys, in the order in which a worker runs them."""
        return dict(self._link.running().setup_cells)

    def clear_setup(self, key: str | None = None) -> None:
        """Forget the setup cell with this key, or all: later workers do not run them. UsageError for an unknown key."""
        if key == "":
            raise UsageError("there is no setup cell ''; without a key all are cleared.")
        self._link.ask(requests.ClearSetup(key or ""))

    @property
    def job(self) -> Job | None:
        """The current or last job, no matter which client began it."""
        newest = self._link.newest
        copy = next(reversed(list(newest.jobs.values())), None) if newest is not None else None
        if copy is not None and (self._job is None or self._job.name != copy.name):
            self._hold(copy)
        return self._job

    def stop_job(self, by: str = "you") -> None:
        """Stop the running job, if there is one."""
        self._link.ask(requests.StopJob(by, self._link.running().present_job))

    # ---- changes: each method returns when the driver has accepted the change ----

    def add_host(self, host: str, by: str = "you") -> None:
        """Add `name`, `name:slots` or `user@name:slots`; a known host gets these slots, and its failures are cleared."""
        configuration = self._link.configuration
        spec = parse_host(host, configuration.default_slots, follow_gpus=configuration.slots_follow_gpus)
        self._link.ask(requests.AddHost(by, spec))

    def remove_host(self, host: str, now: bool = False, by: str = "you", *, within: float | None = None) -> None:
        """Remove a host; its workers leave at the next commit (`now`: at once). UsageError for an unknown host.

        `within`: seconds after which the host ends: workers that have not left by then are killed.
        """
        self._link.ask(requests.RemoveHost(by, host, now, within))

    def scale(self, min: int | None = None, max: int | None = None, by: str = "you") -> None:  # noqa: A002
        """Change the bounds of the world size; a bound that is not given stays."""
        self._link.ask(requests.Scale(by, min, max))

    def restart(self, worker: str, by: str = "you") -> None:
        """Kill this worker (its id, as `localhost/0#1`) and start another in its slot. It does not count as a failure.

        Its world recovers as from any loss. UsageError for an unknown worker, or if the training state would be lost with it.
        """
        self._link.ask(requests.Restart(by, worker))

    def order(self, message: Mapping[str, Any], by: str) -> None:
        """Submit a command of the dashboard. Its outcome is in `status().orders`, a refusal also in `events`.

        ClusterStoppedError if the cluster does not run.
        """
        driver = self._link.running()
        if driver.died:
            raise DriverLostError(f"{driver.end_reason}; another driver takes over: try again.")
        known = self._link.configuration
        driver.request(requests.DashboardAction(by, dict(message), known.default_slots, known.slots_follow_gpus))
