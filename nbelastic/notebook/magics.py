"""The magics: thin skins over `Cluster` and `Job`. They parse, hand over and show; they decide nothing."""

from __future__ import annotations

import json
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, magics_class
from IPython.display import display

from nbelastic.errors import UsageError
from nbelastic.notebook.cell_output import cell_id, checked, show_output
from nbelastic.notebook.magic_arguments import argument, completion, magic, pair
from nbelastic.notebook.script_arguments import SCRIPT_OPTIONS, script_options

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbelastic.client.cluster import Cluster
    from nbelastic.client.job import Job
    from nbelastic.notebook.dashboard import Dashboard
    from nbelastic.notebook.status_text import ClusterList, StatusView
    from nbelastic.protocol.status import WorkerStack


def make_cluster(hosts: str | None, **options: Any) -> Cluster:
    """The real one. Imported late: loading the extension stays quick."""
    from nbelastic.client.cluster import Cluster

    return Cluster(hosts, **options)


def attach_cluster(name: str | None) -> Cluster:
    """One that was kept."""
    from nbelastic.client.cluster import Cluster

    return Cluster.attach(name)


@magics_class
class ElasticMagics(Magics):  # type: ignore[misc]  # IPython carries no types here
    """Keeps the notebook's one cluster, running or last, and its dashboard."""

    def __init__(
        self,
        shell: InteractiveShell,
        make: Callable[..., Cluster] = make_cluster,
        attach: Callable[[str | None], Cluster] = attach_cluster,
    ) -> None:
        super().__init__(shell)
        self.make, self.attach = make, attach
        self.cluster: Cluster | None = None
        self.dashboard: Dashboard | None = None
        self._matcher = completion(self._parser, self._known)

    # Starting and stopping.
    @magic(
        "line",
        argument("--min", type=int, metavar="N", help="train with no fewer workers (default 1)"),
        argument("--max", type=int, metavar="N", help="and with no more (default: as many as there are slots)"),
        argument("--hosts", metavar="HOST", help="name, name:slots or user@name:slots, separated by commas"),
        argument(
            "--discover",
            dest="discovery",
            metavar="SCRIPT",
            help="a script that prints the hosts, one a line, run every second; or a discovery's name, as slurm",
        ),
        argument("--slots", type=int, metavar="N", help="workers on a host that does not say how many"),
        argument("--backend", choices=("auto", "gloo", "nccl"), help="of torch.distributed (default auto)"),
        argument("--spares", type=int, metavar="N", help="workers kept ready beyond --max (default 0)"),
        argument("--elastic-timeout", type=float, metavar="S", help="seconds below --min until a job ends (600)"),
        argument("--reset-limit", type=int, metavar="N", help="breaks until a job ends (default: no limit)"),
        argument("--cooldown", type=float, nargs=2, metavar=("LOW", "HIGH"), help="seconds before a restart (5 300)"),
        argument("--silence", type=float, metavar="S", help="seconds until a silent worker counts as lost (10)"),
        argument("--stall", type=float, metavar="S", help="replace a worker that others wait for so long (never)"),
        argument("--stop-timeout", type=float, metavar="S", help="seconds for a last checkpoint at a stop (60)"),
        argument("--timeouts", metavar="NAMES", help="seconds for other waits, as recover=30,form=120"),
        argument("--nics", metavar="NAMES", help="network interfaces to use, separated by commas (default: found)"),
        argument("--python", metavar="PATH", help="the Python of hosts that are not this machine (this one's path)"),
        argument("--env", action="append", metavar="NAME=VALUE", help="for agents and workers; may be given again"),
        argument("--cwd", metavar="FOLDER", help="where workers run (default: here; elsewhere, the home folder)"),
        argument("--launcher", metavar="NAME", help="ssh (default), or a batch system: slurm, pbs, lsf, sge, htcondor"),
        argument(
            "--launcher-option",
            dest="launcher_options",
            action="append",
            metavar="NAME=VALUE",
            help="of the batch system, as queue=gpu; may be given again",
        ),
        argument("--log-dir", metavar="FOLDER", help="where logs and the event log go"),
        argument("--name", metavar="NAME", help="of this cluster"),
        argument("--preload", metavar="MODULES", help="modules to import before workers fork, separated by commas"),
        argument(
            "--keep", action="store_true", default=None, help="live on when this kernel ends; another one attaches"
        ),
        argument("--lease", type=float, metavar="S", help="with --keep: seconds without a kernel until it ends (3600)"),
        argument("--no-wait", action="store_true", help="return at once instead of waiting for --min workers"),
        argument("--timeout", type=float, metavar="S", help="how many seconds to wait for them"),
        argument("--no-dashboard", action="store_true", help="do not show the dashboard"),
        argument("--cluster", dest="bind", metavar="VARIABLE", help="a variable to keep the Cluster in"),
    )
    def elastic_start(self, options: Namespace) -> None:
        """Start a cluster of workers, on this machine or on --hosts, and show its dashboard."""
        self._make_way()
        self._check_variable(options.bind)
        if options.lease is not None and not options.keep:
            raise UsageError("--lease says nothing without --keep.")
        given = {name: value for name, value in vars(options).items() if value is not None}
        wait = not given.pop("no_wait")
        timeout = given.pop("timeout", None)
        hidden = given.pop("no_dashboard")
        variable = given.pop("bind", None)
        self.cluster = self.make(given.pop("hosts", None), **_as_python(given))
        self._close_dashboard()
        if variable:
            self.shell.user_ns[variable] = self.cluster
        if not hidden:
            self._show()  # before it starts: then one sees what it waits for
        self.cluster.start(wait=wait, timeout=timeout)
        if wait:
            self.cluster.client.activate()  # %px and %%px speak to these engines

    @magic(
        "line",
        argument("name", nargs="?", metavar="KEPT", help="as elastic_list shows it; not needed if there is only one"),
        argument("--job", dest="job", metavar="VARIABLE", help="a variable to keep its Job in"),
        argument("--no-dashboard", action="store_true", help="do not show the dashboard"),
        argument("--cluster", dest="bind", metavar="VARIABLE", help="a variable to keep the Cluster in"),
    )
    def elastic_attach(self, options: Namespace) -> None:
        """Connect to a cluster of this machine, as one that was started with --keep by a kernel that is gone.

        Its job comes back with what it has printed. Several kernels may be attached: all see the same and may give orders.
        """
        self._make_way(attach=True)
        for variable in (options.bind, options.job):
            self._check_variable(variable)
        self.cluster = self.attach(options.name)
        self._close_dashboard()
        for variable, value in ((options.bind, self.cluster), (options.job, self.cluster.job)):
            if variable:
                self.shell.user_ns[variable] = value
        if not options.no_dashboard:
            self._show()
        self.cluster.client.activate()

    @magic("line")
    def elastic_detach(self, _: Namespace) -> None:
        """Let go of a cluster that was started with --keep: it lives on, until %elastic_attach or the end of its lease."""
        self._cluster().detach()
        self.cluster = None

    @magic("line")
    def elastic_list(self, _: Namespace) -> ClusterList:
        """Show your clusters on this machine: with a driver, or waiting for another one."""
        from nbelastic.notebook.status_text import ClusterList
        from nbelastic.protocol.saved_cluster import clusters

        return ClusterList(clusters())

    @magic("line", argument("--job", action="store_true", help="stop only the job; the workers stay"))
    def elastic_stop(self, options: Namespace) -> None:
        """Stop the cluster and every process of it. Stopping twice is fine."""
        if self.cluster is None:
            print("No cluster is running.")
        elif options.job:
            self.cluster.stop_job(by="%elastic_stop")
        else:
            self.cluster.stop()

    # Seeing.
    @magic(
        "line_cell",
        argument(
            "--setup",
            nargs="?",
            const="",
            metavar="KEY",
            help="with a cell: run it on every later worker too; it replaces the cell with this KEY (the notebook's id of the cell)",
        ),
        argument("--timeout", type=float, metavar="S", help="with a cell: how many seconds to wait for it"),
    )
    def elastic(self, options: Namespace, cell: str | None) -> None:
        """%elastic shows the dashboard; %%elastic runs its cell on every ready worker and shows what they print."""
        cluster = self._cluster()
        if cell is not None:
            with checked():
                is_setup = options.setup is not None
                key = (options.setup or cell_id(self.shell)) if is_setup else None
                outputs = cluster.execute(cell, setup=is_setup, key=key, timeout=options.timeout)
            show_output(outputs)
        elif options.setup is not None or options.timeout is not None:
            raise UsageError("--setup and --timeout go with a cell: write %%elastic above it.")
        else:
            self._show()

    @magic(
        "line",
        argument("--clear", nargs="?", const="", metavar="KEY", help="forget the cell with this KEY; without KEY, all"),
    )
    def elastic_setup(self, options: Namespace) -> None:
        """List the setup cells in the order in which each new worker runs them: the key, then the first line."""
        cluster = self._cluster()
        if options.clear is not None:
            cluster.clear_setup(options.clear or None)
            return
        for key, source in cluster.setup_cells.items():
            print(f"{key}: {source.strip().partition(chr(10))[0]}")

    @magic("line")
    def elastic_status(self, _: Namespace) -> StatusView:
        """Show hosts, workers and the job as they are now."""
        from nbelastic.notebook.status_text import StatusView

        return StatusView(self._cluster().status())

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank to read (default: all)"),
        argument("--worker", metavar="WORKER", help="the worker to read, as in localhost/0#1"),
        argument("--tail", type=int, default=100, metavar="N", help="no more than the last N lines (100)"),
    )
    def elastic_logs(self, options: Namespace) -> None:
        """Print what the workers of the current or last job have printed."""
        print(self._job().logs(rank=options.rank, worker=options.worker, tail=options.tail).rstrip("\n"))

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank to look at (default: all workers)"),
        argument("--timeout", type=float, default=2.0, metavar="S", help="how long to wait for answers (2)"),
    )
    def elastic_stacks(self, options: Namespace) -> None:
        """Print where every worker is right now: its Python stack. Says why a training hangs."""
        from nbelastic.notebook.dashboard_queries import alike

        stacks = self._cluster().stacks(timeout=options.timeout)
        if options.rank is not None:
            stacks = [stack for stack in stacks if stack.rank == options.rank]
            if not stacks:
                raise UsageError(f"there is no rank {options.rank} now.")
        for group in alike(stacks):
            print(_title(group), group[0].text, sep="\n")

    @magic("line", argument("file", metavar="FILE", help="as trace.json; Perfetto and chrome://tracing open it"))
    def elastic_trace(self, options: Namespace) -> None:
        """Write the event log as a timeline (Chrome trace JSON)."""
        path = Path(options.file).expanduser()
        try:
            path.write_text(json.dumps(self._cluster().trace()), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        print(f"{path} is written: open it at ui.perfetto.dev or chrome://tracing.")

    # Changing.
    @magic("line", argument("hosts", nargs="+", metavar="NEW", help="name, name:slots or user@name:slots"))
    def elastic_add(self, options: Namespace) -> None:
        """Add hosts. A job that runs takes them in without losing a step; returns at once."""
        cluster = self._cluster()
        for host in options.hosts:
            cluster.add_host(host, by="%elastic_add")

    @magic(
        "line",
        argument("hosts", nargs="+", metavar="HOST", help="the names of hosts"),
        argument("--now", action="store_true", help="at once, without waiting for the next commit"),
    )
    def elastic_remove(self, options: Namespace) -> None:
        """Remove hosts. Their workers leave at the next commit; returns at once."""
        cluster = self._cluster()
        for host in options.hosts:
            cluster.remove_host(host, now=options.now, by="%elastic_remove")

    @magic(
        "line",
        argument("--min", type=int, metavar="N", help="train with no fewer workers"),
        argument("--max", type=int, metavar="N", help="and with no more"),
    )
    def elastic_scale(self, options: Namespace) -> None:
        """Change how many workers there may be; returns at once."""
        if options.min is None and options.max is None:
            raise UsageError("say --min N, --max N or both.")
        self._cluster().scale(min=options.min, max=options.max, by="%elastic_scale")

    @magic("line", argument("workers", nargs="+", metavar="WORKER", help="the workers' ids, as in localhost/0#1"))
    def elastic_restart(self, options: Namespace) -> None:
        """Kill workers and start others in their places; a training goes on without a lost step. Returns at once."""
        cluster = self._cluster()
        for worker in options.workers:
            cluster.restart(worker, by="%elastic_restart")

    # Running and waiting.
    @magic(
        "line_cell",
        argument("--job", dest="bind", metavar="VARIABLE", help="a variable to keep the Job in"),
        argument("--wait", action="store_true", help="return when the job has ended"),
        argument("--timeout", type=float, metavar="S", help="wait, but for no more than S seconds"),
        argument(
            "--checkpoint", metavar="FOLDER", help="of a cell: begin with the newest checkpoint in it, save there"
        ),
        argument("--checkpoint-every", type=int, metavar="N", help="of a cell: commits between two checkpoints (100)"),
        argument("--checkpoint-keep", type=int, metavar="K", help="of a cell: how many checkpoints stay (3)"),
        *SCRIPT_OPTIONS,
        argument("script", nargs=REMAINDER, metavar="SCRIPT", help="a torchrun script and its arguments; no cell then"),
    )
    def elastic_run(self, options: Namespace, cell: str | None) -> Job:
        """Train: %%elastic_run runs its cell as the program of every worker, %elastic_run a torchrun script.

        Returns at once, with a live Job.
        """
        self._check_variable(options.bind)
        plan = {name: value for name, value in vars(options).items() if name.startswith("checkpoint")}
        script = script_options(options)
        if cell is None:
            if not options.script:
                raise UsageError("name a script, or write %%elastic_run above a cell.")
            if any(value is not None for value in plan.values()):
                raise UsageError("--checkpoint and its kin go with a cell: a script saves its own.")
            job = self._cluster().run_script(*options.script, **script)
        elif options.script or script:
            raise UsageError("a script and its options go without a cell: write %elastic_run.")
        else:
            with checked():
                job = self._cluster().run_cell(cell, **plan)
        if options.bind:
            self.shell.user_ns[options.bind] = job
        if options.wait or options.timeout is not None:
            job.result(timeout=options.timeout)
        return job

    @magic(
        "line",
        argument("--world", type=int, metavar="N", help="until N workers are in one world"),
        argument("--timeout", type=float, metavar="S", help="give up after S seconds and say what is missing"),
    )
    def elastic_wait(self, options: Namespace) -> None:
        """Wait until the job has ended or, with --world, until a world of that size runs."""
        if options.world is None:
            self._job().result(timeout=options.timeout)
        else:
            self._cluster().wait(options.world, **({} if options.timeout is None else {"timeout": options.timeout}))

    # What the magics stand on.
    def register(self) -> None:
        """Make them known to IPython, and their completion too."""
        self.shell.register_magics(self)
        self.shell.Completer.custom_matchers.append(self._matcher)

    def unregister(self) -> None:
        """Stop the cluster, or let go of a kept one, and take away what `register` gave."""
        if self.cluster is not None:
            self.cluster.close()
        self._close_dashboard()
        known = self.shell.magics_manager.magics
        for kind, names in self.magics.items():
            for name in names:
                known[kind].pop(name, None)
        self.shell.Completer.custom_matchers.remove(self._matcher)

    def _make_way(self, *, attach: bool = False) -> None:
        """For another cluster, or to attach to the one that is lost here. UsageError if the one there is runs."""
        if self.cluster is not None:
            if self.cluster.status().phase != "finished":
                raise UsageError("a cluster is running already: %elastic shows it, %elastic_stop ends it.")
            if self.cluster.died and attach:
                self.cluster.detach()
            elif self.cluster.died:
                self.cluster.close()
            else:
                self.cluster.stop()

    def _cluster(self) -> Cluster:
        if self.cluster is None:
            raise UsageError("no cluster is running: start one with %elastic_start.")
        return self.cluster

    def _job(self) -> Job:
        job = self._cluster().job
        if job is None:
            raise UsageError("no job has run yet: start one with %%elastic_run.")
        return job

    def _show(self) -> None:
        """The same widget every time: however many views there are, one stream of updates feeds them."""
        from nbelastic.notebook.dashboard import Dashboard

        if self.dashboard is None:
            self.dashboard = Dashboard(self._cluster())
        display(self.dashboard)

    def _close_dashboard(self) -> None:
        """Of the cluster before: else its subscription, its thread and its events stay as long as the kernel."""
        dashboard, self.dashboard = self.dashboard, None
        if dashboard is not None:
            dashboard.close()

    def _parser(self, name: str, is_cell: bool) -> ArgumentParser | None:
        return getattr(self.magics["cell" if is_cell else "line"].get(name), "parser", None)

    def _known(self) -> dict[str, Callable[[], Iterable[str]]]:
        cluster = self.cluster
        if cluster is None:
            return {"HOST": lambda: ["localhost"], "KEPT": _kept}
        return {
            "KEPT": _kept,
            "HOST": lambda: [host.name for host in cluster.hosts],
            "RANK": lambda: [str(worker.rank) for worker in cluster.workers if worker.rank is not None],
            "WORKER": lambda: [worker.id for worker in cluster.workers],
        }

    def _check_variable(self, name: str | None) -> None:
        if name is not None and not name.isidentifier():
            raise UsageError(f"{name!r} is no name for a variable.")


def _kept() -> list[str]:
    from nbelastic.protocol.saved_cluster import clusters

    return [info.name for info in clusters() if info.kept]


def _title(group: Sequence[WorkerStack]) -> str:
    """Text of the ranks, hosts and lag of the workers in `group`."""
    ranks = [str(stack.rank) for stack in group if stack.rank is not None]
    word = "rank" if len(ranks) == 1 else "ranks"
    who = [f"{word} {', '.join(ranks)}"] if ranks else []
    who.append(", ".join(stack.worker for stack in group))
    where = group[0].place if group[0].text else "no answer: its process is stopped, or C code holds the interpreter"
    return " · ".join(filter(None, (*who, where, group[0].note)))


def _as_python(options: dict[str, Any]) -> dict[str, Any]:
    """Tuples, where the line has commas or blanks; mappings, where it has equal signs."""
    if "preload" in options:
        options["preload"] = tuple(part.strip() for part in options["preload"].split(",") if part.strip())
    if "cooldown" in options:
        options["cooldown"] = tuple(options["cooldown"])
    if "timeouts" in options:
        given = (part for part in options["timeouts"].split(",") if part.strip())
        options["timeouts"] = dict(pair("--timeouts", part.strip()) for part in given)
    for name, flag in (("env", "--env"), ("launcher_options", "--launcher-option")):
        if name in options:
            options[name] = dict(pair(flag, text) for text in options[name])
    return options
