"""The magics that bring a notebook's values to the workers, and the training state back."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, several


@magics_class
class DataMagics(ClusterMagics):
    """The part of `ElasticMagics` that moves values."""

    @magic("line", several("names", metavar="VARIABLE", help="variables of the notebook"))
    def elastic_push(self, options: Namespace) -> None:
        """Set variables of the notebook on every worker, also on those that join later. Returns when they are set."""
        cluster, namespace = self._cluster(), self.shell.user_ns
        missing = [name for name in options.names if name not in namespace]
        if missing:
            raise UsageError(f"the notebook has no variable {missing[0]!r}.")
        cluster.push({name: namespace[name] for name in options.names})

    @magic(
        "line",
        argument("variable", metavar="VARIABLE", help="variable of the notebook that gets the state"),
        argument(
            "name", nargs="?", metavar="NAME", help="only this value of the state, as in model (default: all by name)"
        ),
        argument("--timeout", type=float, metavar="S", help="wait for at most S seconds"),
    )
    def elastic_pull(self, options: Namespace) -> None:
        """Copy the training state of the current or last job into a variable: `%elastic_pull weights model`.

        A model's value is its `state_dict()`. While a job trains, rank 0 copies it at the next commit.
        """
        self._check_variable(options.variable)
        self._keep(options.variable, self._job().state_dict(options.name, timeout=options.timeout))
