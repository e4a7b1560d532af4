"""Closes the clusters of this process when it ends. If it is killed, their drivers notice."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Protocol


class Closable(Protocol):
    """A cluster."""

    name: str

    def close(self) -> None:
        """Stop it, or leave it running."""
        ...


_clusters: dict[str, Closable] = {}  # by name


def close_at_kernel_end(cluster: Closable) -> None:
    _clusters[cluster.name] = cluster


def do_not_close_at_kernel_end(cluster: Closable) -> None:
    if _clusters.get(cluster.name) is cluster:  # another cluster may have taken the name
        del _clusters[cluster.name]


def _close_all() -> None:
    for cluster in list(_clusters.values()):
        with contextlib.suppress(Exception):  # such as: it has just ended, or no thread can be started any more
            cluster.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_clusters.clear)  # a forked child ends, too, and the clusters are not its own
