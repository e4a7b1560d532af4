"""The magics. They parse their line, call a method of `Cluster` or `Job`, and show the result."""

from __future__ import annotations

import json
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import magics_class
from IPython.display import display

from nbelastic.errors import UsageError
from nbelastic.notebook.cell_output import cell_id, short_syntax_errors, show_commit_output, show_output
from nbelastic.notebook.change_magics import ChangeMagics
from nbelastic.notebook.magic_arguments import argument, completion, magic
from nbelastic.notebook.px_guard import guard_px
from nbelastic.notebook.script_arguments import SCRIPT_OPTIONS, script_options
from nbelastic.notebook.stack_groups import group_equal_stacks, group_title
from nbelastic.notebook.start_options import START_OPTIONS, cluster_arguments

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbelastic.client.cluster import Cluster
    from nbelastic.client.job import Job
    from nbelastic.notebook.dashboard import Dashboard
    from nbelastic.notebook.status_text import ClusterList, StatusView


def create_cluster(hosts: str | None, **options: Any) -> Cluster:
    """Create a cluster. The import is late, so that the extension loads fast."""
    from nbelastic.client.cluster import Cluster

    return Cluster(hosts, **options)


def attach_cluster(name: str | None) -> Cluster:
    """Attach to a cluster that runs."""
    from nbelastic.client.cluster import Cluster

    return Cluster.attach(name)


@magics_class
class ElasticMagics(ChangeMagics):
    """The magics of a notebook, with its present or last cluster and the dashboard."""

    def __init__(
        self,
        shell: InteractiveShell,
        create: Callable[..., Cluster] = create_cluster,
        attach: Callable[[str | None], Cluster] = attach_cluster,
    ) -> None:
        super().__init__(shell)
        self.create, self.attach = create, attach
        self.dashboard: Dashboard | None = None
        self._matcher = completion(self._parser, self._known_values)

    # ---- start and stop ----

    @magic(
        "line",
        *START_OPTIONS,
    )
    def elastic_start(self, options: Namespace) -> None:
        """Start a cluster of workers, on this machine or on --hosts, and show its dashboard."""
        self._close_cluster()
        self._check_variable(options.cluster_variable)
        if options.lease is not None and not options.keep:
            raise UsageError("--lease has no effect without --keep.")
        given = {name: value for name, value in vars(options).items() if value is not None}
        wait = not given.pop("no_wait")
        timeout = given.pop("timeout", None)
        is_hidden = given.pop("no_dashboard")
        variable = given.pop("cluster_variable", None)
        self.cluster = self.create(given.pop("hosts", None), **cluster_arguments(given))
        self._close_dashboard()
        if variable:
            self.shell.user_ns[variable] = self.cluster
        if not is_hidden:
            self._show_dashboard()  # before the start, so that it shows what the start waits for
        self.cluster.start(wait=wait, timeout=timeout)
        if wait:
            self._activate_px()

    @magic(
        "line",
        argument("name", nargs="?", metavar="KEPT", help="name of the cluster; not needed if there is only one"),
        argument("--job", dest="job_variable", metavar="VARIABLE", help="variable that gets the Job"),
        argument("--no-dashboard", action="store_true", help="do not show the dashboard"),
        argument("--cluster", dest="cluster_variable", metavar="VARIABLE", help="variable that gets the Cluster"),
    )
    def elastic_attach(self, options: Namespace) -> None:
        """Connect to a cluster on this machine, such as one started with --keep by a kernel that has ended.

        Its job comes back with what it has printed. Several kernels may attach: all see the same and may change the cluster.
        """
        self._close_cluster(attach=True)
        for variable in (options.cluster_variable, options.job_variable):
            self._check_variable(variable)
        self.cluster = self.attach(options.name)
        self._close_dashboard()
        for variable, value in (
            (options.cluster_variable, self.cluster),
            (options.job_variable, self.cluster.job),
        ):
            if variable:
                self.shell.user_ns[variable] = value
        if not options.no_dashboard:
            self._show_dashboard()
        self._activate_px()

    @magic("line")
    def elastic_detach(self, _: Namespace) -> None:
        """Leave a cluster that was started with --keep: it lives on until %elastic_attach or the end of its lease."""
        self._cluster().detach()
        self.cluster = None

    @magic("line")
    def elastic_list(self, _: Namespace) -> ClusterList:
        """Show your clusters on this machine, with a driver or waiting for one."""
        from nbelastic.notebook.status_text import ClusterList
        from nbelastic.protocol.local_clusters import clusters

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

    # ---- observe ----

    @magic(
        "line_cell",
        argument(
            "--setup",
            nargs="?",
            const="",
            metavar="KEY",
            help="with a cell: run it on later workers too; it replaces the setup cell with this KEY (default: the cell's id)",
        ),
        argument("--timeout", type=float, metavar="S", help="with a cell: how many seconds to wait for it"),
        argument("--at-commit", action="store_true", help="with a cell: run it in the middle of the running program"),
        argument(
            "--rank", type=int, action="append", metavar="RANK", help="with --at-commit: only on this rank (repeatable)"
        ),
        argument("--limit", type=float, metavar="S", help="with --at-commit: interrupt the cell after S seconds (30)"),
    )
    def elastic(self, options: Namespace, cell: str | None) -> None:
        """%elastic shows the dashboard; %%elastic runs its cell on every ready worker and shows what they print.

        While a job trains, %%elastic --at-commit runs the cell between two steps, with the names of the program.
        """
        cluster = self._cluster()
        given = {"ranks": options.rank, "limit": options.limit}
        at_commit = {name: value for name, value in given.items() if value is not None}
        if at_commit and not options.at_commit:
            raise UsageError("--rank and --limit need --at-commit.")
        if cell is None:
            if options.at_commit or options.setup is not None or options.timeout is not None:
                raise UsageError("--setup, --at-commit and --timeout need a cell: write %%elastic above it.")
            self._show_dashboard()
        elif options.at_commit:
            if options.setup is not None:
                raise UsageError("a setup cell runs between jobs: leave out --setup or --at-commit.")
            with short_syntax_errors():
                rows = cluster.execute(cell, at_commit=True, timeout=options.timeout, **at_commit)
            show_commit_output(rows)
        else:
            with short_syntax_errors():
                is_setup = options.setup is not None
                key = (options.setup or cell_id(self.shell)) if is_setup else None
                outputs = cluster.execute(cell, setup=is_setup, key=key, timeout=options.timeout)
            show_output(outputs)

    @magic(
        "line",
        argument(
            "--clear", nargs="?", const="", metavar="KEY", help="forget the setup cell with this KEY; without KEY, all"
        ),
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
        argument("--tail", type=int, default=100, metavar="N", help="print the last N lines (100)"),
    )
    def elastic_logs(self, options: Namespace) -> None:
        """Print what the workers of the current or last job have printed."""
        print(self._job().logs(rank=options.rank, worker=options.worker, tail=options.tail).rstrip("\n"))

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank to show (default: all workers)"),
        argument("--timeout", type=float, default=2.0, metavar="S", help="how many seconds to wait for answers (2)"),
    )
    def elastic_stacks(self, options: Namespace) -> None:
        """Print where every worker is right now: its Python stack. It shows why a training hangs."""
        stacks = self._cluster().stacks(timeout=options.timeout)
        if options.rank is not None:
            stacks = [stack for stack in stacks if stack.rank == options.rank]
            if not stacks:
                raise UsageError(f"there is no rank {options.rank} now.")
        for group in group_equal_stacks(stacks):
            print(group_title(group), group[0].text, sep="\n")

    @magic("line", argument("file", metavar="FILE", help="file to write, for example trace.json"))
    def elastic_trace(self, options: Namespace) -> None:
        """Write the event log as a timeline (Chrome trace JSON), which Perfetto and chrome://tracing open."""
        path = Path(options.file).expanduser()
        try:
            path.write_text(json.dumps(self._cluster().trace()), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        print(f"{path} has been written: open it at ui.perfetto.dev or chrome://tracing.")

    # ---- run and wait ----

    @magic(
        "line_cell",
        argument("--job", dest="job_variable", metavar="VARIABLE", help="variable that gets the Job"),
        argument("--wait", action="store_true", help="return when the job has ended"),
        argument("--timeout", type=float, metavar="S", help="wait for at most S seconds"),
        argument(
            "--checkpoint",
            metavar="FOLDER",
            help="for a cell: start from the newest checkpoint in this folder, and save there",
        ),
        argument("--checkpoint-every", type=int, metavar="N", help="for a cell: commits between two checkpoints (100)"),
        argument("--checkpoint-keep", type=int, metavar="K", help="for a cell: how many checkpoints are kept (3)"),
        *SCRIPT_OPTIONS,
        argument(
            "script", nargs=REMAINDER, metavar="SCRIPT", help="instead of a cell: a torchrun script and its arguments"
        ),
    )
    def elastic_run(self, options: Namespace, cell: str | None) -> Job:
        """Train: %%elastic_run runs its cell as the program of every worker, %elastic_run runs a torchrun script.

        Returns a Job at once.
        """
        self._check_variable(options.job_variable)
        checkpoints = {name: value for name, value in vars(options).items() if name.startswith("checkpoint")}
        script = script_options(options)
        if cell is None:
            if not options.script:
                raise UsageError("name a script, or write %%elastic_run above a cell.")
            if any(value is not None for value in checkpoints.values()):
                raise UsageError("--checkpoint options need a cell: a script saves its own checkpoints.")
            job = self._cluster().run_script(*options.script, **script)
        elif options.script or script:
            raise UsageError("a script and its options cannot be combined with a cell: write %elastic_run.")
        else:
            with short_syntax_errors():
                job = self._cluster().run_cell(cell, **checkpoints)
        if options.job_variable:
            self.shell.user_ns[options.job_variable] = job
        if options.wait or options.timeout is not None:
            job.result(timeout=options.timeout)
        return job

    @magic(
        "line",
        argument("--world", type=int, metavar="N", help="wait until N workers are in one world"),
        argument("--timeout", type=float, metavar="S", help="give up after S seconds and report what is missing"),
    )
    def elastic_wait(self, options: Namespace) -> None:
        """Wait until the job has ended or, with --world, until a world of that size runs."""
        if options.world is None:
            self._job().result(timeout=options.timeout)
        else:
            self._cluster().wait(options.world, **({} if options.timeout is None else {"timeout": options.timeout}))

    # ---- registration and shared parts ----

    def register(self) -> None:
        """Register the magics and their completion with IPython."""
        self.shell.register_magics(self)
        self.shell.Completer.custom_matchers.append(self._matcher)

    def unregister(self) -> None:
        """Stop the cluster, or detach a kept one, and undo `register`."""
        if self.cluster is not None:
            self.cluster.close()
        self._close_dashboard()
        registered = self.shell.magics_manager.magics
        for kind, names in self.magics.items():
            for name in names:
                registered[kind].pop(name, None)
        self.shell.Completer.custom_matchers.remove(self._matcher)

    def _close_cluster(self, *, attach: bool = False) -> None:
        """Close the last cluster before another start, or leave it before an attach. UsageError if it runs."""
        if self.cluster is not None:
            if self.cluster.status().phase != "finished":
                raise UsageError("a cluster is running already: %elastic shows it, %elastic_stop ends it.")
            if self.cluster.died and attach:
                self.cluster.detach()
            elif self.cluster.died:
                self.cluster.close()
            else:
                self.cluster.stop()

    def _job(self) -> Job:
        job = self._cluster().job
        if job is None:
            raise UsageError("no job has run yet: start one with %%elastic_run.")
        return job

    def _activate_px(self) -> None:
        """Have %px and %%px run on these engines. While a job trains they refuse, as they would wait for its end."""
        cluster = self._cluster()

        def present_job() -> str:
            job = cluster.job
            return job.name if job is not None and not job.done() else ""

        cluster.client.activate()
        guard_px(self.shell, present_job)

    def _show_dashboard(self) -> None:
        """Show the dashboard, always the same widget: one stream of updates serves all its views."""
        from nbelastic.notebook.dashboard import Dashboard

        if self.dashboard is None:
            self.dashboard = Dashboard(self._cluster())
        display(self.dashboard)

    def _close_dashboard(self) -> None:
        """Close the last cluster's dashboard, else its subscription, thread and events last as long as the kernel."""
        dashboard, self.dashboard = self.dashboard, None
        if dashboard is not None:
            dashboard.close()

    def _parser(self, name: str, is_cell: bool) -> ArgumentParser | None:
        return getattr(self.magics["cell" if is_cell else "line"].get(name), "parser", None)

    def _known_values(self) -> dict[str, Callable[[], Iterable[str]]]:
        cluster = self.cluster
        if cluster is None:
            return {"HOST": lambda: ["localhost"], "KEPT": _kept_clusters}
        return {
            "KEPT": _kept_clusters,
            "HOST": lambda: [host.name for host in cluster.hosts],
            "RANK": lambda: [str(worker.rank) for worker in cluster.workers if worker.rank is not None],
            "WORKER": lambda: [worker.id for worker in cluster.workers],
        }

    def _check_variable(self, name: str | None) -> None:
        if name is not None and not name.isidentifier():
            raise UsageError(f"{name!r} is not a valid variable name.")


for _kind, _own in ElasticMagics.magics.items():
    _own.update(ChangeMagics.magics[_kind])  # IPython registers those of one class only


def _kept_clusters() -> list[str]:
    from nbelastic.protocol.local_clusters import clusters

    return [info.name for info in clusters() if info.kept]
