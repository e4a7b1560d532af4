"""The magic that injects faults into a cluster, and shows what they led to."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, out, several
from nbelastic.system.argument_types import seconds

if TYPE_CHECKING:
    from nbelastic.client.chaos_report import ChaosReport


@magics_class
class ChaosMagics(ClusterMagics):
    """The part of `ElasticMagics` that injects faults."""

    @magic(
        "line",
        argument("--every", type=seconds, default=60.0, metavar="T", help="about the time between two faults (60)"),
        several("--kinds", metavar="KINDS", help="kill, stop (a worker's process), host (its agent is killed); all"),
        argument(
            "--for", dest="duration", type=seconds, metavar="T", help="for how long: 90, 10m or 2h (until the job ends)"
        ),
        argument("--seed", type=int, metavar="N", help="make the same choices again (default: random)"),
        argument("--below-min", action="store_true", help="fewer workers than min may be left"),
        out("the report, which is then not shown"),
    )
    def elastic_chaos(self, options: Namespace) -> ChaosReport | None:
        """Try what your program survives: inject faults at random moments, and report what they led to. Ctrl-C ends it.

        The cluster must have been started with --chaos. Prints one line per fault.
        """
        self._check_variable(options.out_variable)
        given = {name: getattr(options, name) for name in ("every", "kinds", "duration", "seed", "below_min")}
        chosen = {name: value for name, value in given.items() if value is not None}
        report = self._cluster().chaos(by="%elastic_chaos", **chosen)
        return None if self._keep(options.out_variable, report) else report
