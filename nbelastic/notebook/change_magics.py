"""The magics that change a cluster, or stop and continue its training. Each returns at once or says what it waits for."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, several


@magics_class
class ChangeMagics(ClusterMagics):
    """The part of `ElasticMagics` that changes clusters and pauses jobs."""

    # ---- hosts and workers ----

    @magic("line", several("hosts", metavar="NEW", help="name, name:slots or user@name:slots"))
    def elastic_add(self, options: Namespace) -> None:
        """Add hosts. A running job includes them without losing a step. Returns at once."""
        cluster = self._cluster()
        for host in options.hosts:
            cluster.add_host(host, by="%elastic_add")

    @magic(
        "line",
        several("hosts", metavar="HOST", help="the names of hosts"),
        argument("--now", action="store_true", help="remove at once, without waiting for the next commit"),
        argument(
            "--in", dest="within", type=float, metavar="S", help="the hosts end in S seconds, whatever still runs there"
        ),
    )
    def elastic_remove(self, options: Namespace) -> None:
        """Remove hosts. Their workers leave at the next commit. Returns at once."""
        cluster = self._cluster()
        for host in options.hosts:
            cluster.remove_host(host, now=options.now, by="%elastic_remove", within=options.within)

    @magic(
        "line",
        argument("--min", type=int, metavar="N", help="least number of workers to train with"),
        argument("--max", type=int, metavar="N", help="greatest number of workers"),
    )
    def elastic_scale(self, options: Namespace) -> None:
        """Change how many workers there may be. Returns at once."""
        if options.min is None and options.max is None:
            raise UsageError("give --min N, --max N or both.")
        self._cluster().scale(min=options.min, max=options.max, by="%elastic_scale")

    @magic("line", several("workers", metavar="WORKER", help="the workers' ids, as in localhost/0#1"))
    def elastic_restart(self, options: Namespace) -> None:
        """Kill workers and start others in their slots. A training goes on without a lost step. Returns at once."""
        cluster = self._cluster()
        for worker in options.workers:
            cluster.restart(worker, by="%elastic_restart")

    # ---- the training ----

    @magic(
        "line",
        argument(
            "--timeout", type=float, default=60.0, metavar="S", help="how many seconds to wait for the commit (60)"
        ),
    )
    def elastic_pause(self, options: Namespace) -> None:
        """Stop the training at its next commit, until %elastic_resume. %%elastic_px --at-commit runs cells there."""
        cluster = self._cluster()
        cluster.pause(timeout=options.timeout, by="%elastic_pause")
        print(cluster.status().reason)

    @magic("line")
    def elastic_resume(self, _: Namespace) -> None:
        """Let a paused training go on. Returns at once."""
        self._cluster().resume(by="%elastic_resume")

    @magic(
        "line",
        argument("steps", nargs="?", type=int, default=1, metavar="N", help="how many commits to make (1)"),
        argument("--timeout", type=float, metavar="S", help="wait for at most S seconds"),
    )
    def elastic_step(self, options: Namespace) -> None:
        """Let a paused training make N commits, and pause it again. A training that is not paused is paused."""
        cluster = self._cluster()
        cluster.step(options.steps, timeout=options.timeout, by="%elastic_step")
        print(cluster.status().reason)
