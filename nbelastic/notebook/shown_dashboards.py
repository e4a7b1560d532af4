"""The dashboards that cells show: one for each cluster. That of a cluster that has ended is closed when another one begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.notebook.dashboard import Dashboard

_shown: dict[Cluster, Dashboard] = {}


def dashboard_of(cluster: Cluster) -> Dashboard:
    """The cluster's dashboard, always the same widget: one stream of updates serves all its views."""
    from nbelastic.notebook.dashboard import Dashboard

    close_ended(cluster)
    if cluster not in _shown:
        _shown[cluster] = Dashboard(cluster)
    return _shown[cluster]


def close_ended(present: Cluster | None) -> None:
    """Close the dashboards of clusters that have ended, except that of `present`, which is about to start.

    Else their subscriptions, threads and events would last as long as the kernel.
    """
    for cluster in [one for one in _shown if one is not present and one.status().phase == "finished"]:
        _shown.pop(cluster).close()
