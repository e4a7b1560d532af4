"""The dashboards that cells show: one for each cluster and each session of a front end.

The dashboards of a cluster that has ended are closed when another one begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.notebook.dashboard import Dashboard

MOST_SESSIONS = 4  # of a cluster; each has updates of its own, and a page that is loaded again has a new one
_shown: dict[tuple[Cluster, str], Dashboard] = {}


def dashboard_of(cluster: Cluster) -> Dashboard:
    """The cluster's dashboard, the same widget in all cells of a session: one stream of updates serves all its views."""
    from nbelastic.notebook.dashboard import Dashboard

    close_ended(cluster)
    key = (cluster, _session())
    others = [other for other in _shown if other[0] is cluster and other != key]
    for other in others[: 1 - MOST_SESSIONS]:  # the first one was shown longest ago
        _shown.pop(other).close()
    _shown[key] = _shown.pop(key) if key in _shown else Dashboard(cluster)
    return _shown[key]


def close_ended(present: Cluster | None) -> None:
    """Close the dashboards of clusters that have ended, except that of `present`, which is about to start.

    Else their subscriptions, threads and events would last as long as the kernel.
    """
    for key in [key for key in _shown if key[0] is not present and key[0].status().phase == "finished"]:
        _shown.pop(key).close()


def _session() -> str:
    """The session that sent the present cell. VS Code, after a reload, has a new one and knows no widget of the last one."""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    return str(parent.get("header", {}).get("session", ""))
