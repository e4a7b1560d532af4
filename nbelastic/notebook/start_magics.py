"""The magics that start a cluster, attach to one, leave it and stop it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, out
from nbelastic.notebook.px_guard import register_px
from nbelastic.notebook.shown_dashboards import close_ended
from nbelastic.notebook.start_options import START_OPTIONS, cluster_arguments

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.notebook.status_text import ClusterList


@magics_class
class StartMagics(ClusterMagics):
    """The part of `ElasticMagics` that starts and stops clusters."""

    create: Callable[..., Cluster]
    attach: Callable[[str | None], Cluster]

    @magic(
        "line",
        *START_OPTIONS,
    )
    def elastic_start(self, options: Namespace) -> None:
        """Start a cluster of workers, on this machine or on --hosts, and show its dashboard."""
        self._check_variable(options.cluster_variable)
        if options.lease is not None and not options.keep:
            raise UsageError("--lease has no effect without --keep.")
        given = {name: value for name, value in vars(options).items() if value is not None}
        wait = not given.pop("no_wait")
        timeout = given.pop("timeout", None)
        is_hidden = given.pop("no_dashboard")
        variable = given.pop("cluster_variable", None)
        hosts = ",".join(given.pop("hosts", ())) or None
        cluster = self.create(hosts, **cluster_arguments(given))
        self._close_cluster()  # which kills what a lost one has left: not before all options are right
        self.cluster = cluster
        close_ended(self.cluster)
        self._keep(variable, self.cluster)
        if not is_hidden:
            self._show_dashboard()  # before the start, so that it shows what the start waits for
        self._register_px()  # the wait may be interrupted
        self.cluster.start(wait=wait, timeout=timeout)

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
        close_ended(self.cluster)
        for variable, value in (
            (options.cluster_variable, self.cluster),
            (options.job_variable, self.cluster.job),
        ):
            self._keep(variable, value)
        if not options.no_dashboard:
            self._show_dashboard()
        self._register_px()

    @magic("line")
    def elastic_detach(self, _: Namespace) -> None:
        """Leave a cluster that was started with --keep: it lives on until %elastic_attach or the end of its lease."""
        self._cluster().detach()
        self.cluster = None

    @magic("line", out("the list, which is then not shown"))
    def elastic_list(self, options: Namespace) -> ClusterList | None:
        """Show your clusters on this machine, with a driver or waiting for one."""
        from nbelastic.notebook.status_text import ClusterList
        from nbelastic.protocol.local_clusters import clusters

        shown = ClusterList(clusters())
        return None if self._keep(options.out_variable, shown.clusters) else shown

    @magic("line", argument("--job", action="store_true", help="stop only the job; the workers stay"))
    def elastic_stop(self, options: Namespace) -> None:
        """Stop the cluster and every process of it. Stopping twice is fine."""
        if self.cluster is None:
            print("No cluster is running.")
        elif options.job:
            self.cluster.stop_job(by="%elastic_stop")
        else:
            from nbelastic.notebook.status_text import print_unanswered

            self.cluster.stop()
            print_unanswered(self.cluster)

    def _close_cluster(self, *, attach: bool = False) -> None:
        """Close the last cluster before another start, or leave it before an attach. UsageError if it runs."""
        if self.cluster is not None:
            if self.cluster.status().phase != "finished":
                raise UsageError("a cluster is running already: %elastic_dashboard shows it, %elastic_stop ends it.")
            if self.cluster.died and attach:
                self.cluster.detach()
            elif self.cluster.died:
                self.cluster.close()
            else:
                self.cluster.stop()

    def _register_px(self) -> None:
        """Have %px and %%px run on the workers of this cluster."""
        cluster = self._cluster()

        def present_job() -> str:
            job = cluster.job
            return job.name if job is not None and not job.done() else ""

        register_px(self.shell, lambda: cluster.client, present_job)
