"""All magics of the notebook, and their registration. Each parses its line, calls `Cluster` or `Job`, and shows the result."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import magics_class

from nbelastic.notebook.cell_magics import CellMagics
from nbelastic.notebook.change_magics import ChangeMagics
from nbelastic.notebook.chaos_magics import ChaosMagics
from nbelastic.notebook.data_magics import DataMagics
from nbelastic.notebook.magic_arguments import completion
from nbelastic.notebook.run_magics import RunMagics
from nbelastic.notebook.shown_dashboards import close_ended
from nbelastic.notebook.start_magics import StartMagics
from nbelastic.notebook.view_magics import ViewMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbelastic.client.cluster import Cluster


def create_cluster(hosts: str | None, **options: Any) -> Cluster:
    """Create a cluster. The import is late, so that the extension loads fast."""
    from nbelastic.client.cluster import Cluster

    return Cluster(hosts, **options)


def attach_cluster(name: str | None) -> Cluster:
    """Attach to a cluster that runs."""
    from nbelastic.client.cluster import Cluster

    return Cluster.attach(name)


@magics_class
class ElasticMagics(StartMagics, RunMagics, CellMagics, ViewMagics, ChangeMagics, ChaosMagics, DataMagics):
    """The magics of a notebook, with its present or last cluster and the dashboard."""

    def __init__(
        self,
        shell: InteractiveShell,
        create: Callable[..., Cluster] = create_cluster,
        attach: Callable[[str | None], Cluster] = attach_cluster,
    ) -> None:
        super().__init__(shell)
        self.create, self.attach = create, attach
        self._matcher = completion(self._parser, self._known_values)

    def register(self) -> None:
        """Register the magics and their completion with IPython."""
        self.shell.register_magics(self)
        self.shell.Completer.custom_matchers.append(self._matcher)

    def unregister(self) -> None:
        """Stop the cluster, or detach a kept one, and undo `register`."""
        if self.cluster is not None:
            self.cluster.close()
        close_ended(None)
        registered = self.shell.magics_manager.magics
        for kind, names in self.magics.items():
            for name in names:
                registered[kind].pop(name, None)
        self.shell.Completer.custom_matchers.remove(self._matcher)

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


for _kind, _own in ElasticMagics.magics.items():
    for _part in ElasticMagics.__bases__:
        _own.update(_part.magics[_kind])  # IPython registers those of one class only


def _kept_clusters() -> list[str]:
    from nbelastic.protocol.local_clusters import clusters

    return [info.name for info in clusters() if info.kept]
