"""The magics that show what a cluster does and change nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, out, several
from nbelastic.notebook.stack_groups import group_equal_stacks, group_title
from nbelastic.system.argument_types import user_path

if TYPE_CHECKING:
    from nbelastic.notebook.status_text import FindingList, StatusView


@magics_class
class ViewMagics(ClusterMagics):
    """The part of `ElasticMagics` that shows status, logs, stacks and the timeline."""

    @magic("line")
    def elastic_dashboard(self, _: Namespace) -> None:
        """Show the dashboard, as often as you like: all views show the same."""
        self._show_dashboard()

    @magic("line", out("the Status, which is then not shown"))
    def elastic_status(self, options: Namespace) -> StatusView | None:
        """Show hosts, workers and the job as they are now."""
        from nbelastic.notebook.status_text import StatusView

        shown = StatusView.of(self._cluster())
        return None if self._keep(options.out_variable, shown.status) else shown

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank to read (default: all)"),
        argument("--worker", metavar="WORKER", help="the worker to read, as in localhost/0#1"),
        argument("--tail", type=int, default=100, metavar="N", help="print the last N lines (100)"),
        out("the text, which is then not printed"),
    )
    def elastic_logs(self, options: Namespace) -> None:
        """Print what the workers of the current or last job have printed."""
        if options.rank is not None and options.worker is not None:
            raise UsageError("give RANK or --worker, not both.")
        text = self._job().logs(rank=options.rank, worker=options.worker, tail=options.tail).rstrip("\n")
        if not self._keep(options.out_variable, text):
            print(text)

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank to show (default: all workers)"),
        argument("--timeout", type=float, default=2.0, metavar="S", help="how many seconds to wait for answers (2)"),
        out("the list of stacks, which are then not printed"),
    )
    def elastic_stacks(self, options: Namespace) -> None:
        """Print where every worker is right now: its Python stack. It shows why a training hangs."""
        stacks = self._cluster().stacks(timeout=options.timeout)
        if options.rank is not None:
            stacks = [stack for stack in stacks if stack.rank == options.rank]
            if not stacks:
                raise UsageError(f"there is no rank {options.rank} now.")
        if self._keep(options.out_variable, stacks):
            return
        for group in group_equal_stacks(stacks):
            print(group_title(group), group[0].text, sep="\n")

    @magic(
        "line",
        several("hosts", metavar="HOST", help="name or user@name (default: the hosts of the cluster)", default=()),
        argument("--python", metavar="PATH", help="Python on hosts other than this machine (default: this one's path)"),
        out("the findings, which are then not shown"),
    )
    def elastic_doctor(self, options: Namespace) -> FindingList | None:
        """Examine this machine and other hosts: ssh, versions, GPUs, and the network between them. No cluster is needed."""
        from nbelastic.client.doctor import examine
        from nbelastic.notebook.status_text import FindingList

        hosts = options.hosts or [host.name for host in (self.cluster.hosts if self.cluster is not None else ())]
        shown = FindingList(examine(hosts, options.python))
        return None if self._keep(options.out_variable, shown.findings) else shown

    @magic("line", argument("file", metavar="FILE", help="file to write, for example trace.json"))
    def elastic_trace(self, options: Namespace) -> None:
        """Write the event log as a timeline (Chrome trace JSON), which Perfetto and chrome://tracing open."""
        path = user_path(options.file)
        try:
            path.write_text(json.dumps(self._cluster().trace()), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        print(f"{path} has been written: open it at ui.perfetto.dev or chrome://tracing.")
