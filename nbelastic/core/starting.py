"""Agents that never speak, and workers that never come up."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core import generations, provisioning
from nbelastic.core.state import ClusterState

Commands = list[cmd.Command]


def overdue(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """They have had their time: their hosts count as lost, and other workers are started in their place."""
    timeouts = cluster.limits.timeouts
    for name, host in tuple(cluster.hosts.items()):
        if now >= provisioning.speaks_by(cluster, host):
            why = f"its agent has said nothing for {timeouts.agent:g} s"
            cluster = generations.leave_out(cluster, name, why, now, out, kind="host-lost")
    for w in [w for w in sorted(cluster.starting) if now >= provisioning.comes_by(cluster, w)]:
        why = f"{w} has not come up within {now - cluster.workers[w].since:.0f} s"
        out.append(cmd.StopWorker(w, kill=True))
        cluster = generations.gone(cluster, w, why, now, out)
    return cluster
