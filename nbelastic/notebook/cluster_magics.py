"""What all classes of magics share: the notebook's cluster, its job and its dashboard."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING

from IPython.core.magic import Magics
from IPython.display import display

from nbelastic.errors import UsageError
from nbelastic.notebook.shown_dashboards import dashboard_of

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.client.job import Job


class ClusterMagics(Magics):  # type: ignore[misc]  # IPython carries no types here
    """The base of each class of magics."""

    cluster: Cluster | None = None  # the notebook's present or last one

    def _cluster(self) -> Cluster:
        if self.cluster is None:
            raise UsageError("no cluster is running: start one with %elastic_start.")
        return self.cluster

    def _job(self) -> Job:
        job = self._cluster().job
        if job is None:
            raise UsageError("no job has run yet: start one with %%elastic_run.")
        return job

    def _show_dashboard(self) -> None:
        display(dashboard_of(self._cluster()))

    def _keep(self, variable: str | None, value: object) -> bool:
        """Set the user's variable, if there is one. Returns whether there is."""
        self._check_variable(variable)
        if variable:
            self.shell.user_ns[variable] = value
        return bool(variable)

    def _check_variable(self, name: str | None) -> None:
        if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
            raise UsageError(f"{name!r} is not a valid variable name.")
