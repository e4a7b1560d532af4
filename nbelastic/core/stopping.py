"""The end of the cluster."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle, jobs, losses
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER


def stop(cluster: ClusterState, event: ev.StopRequested, now: float, out: Commands) -> ClusterState:
    """Stop the cluster: first programs and scripts, which may write a last checkpoint, then the agents."""
    reason = event.reason
    if not cluster.stopping:
        cluster = jobs.end(replace(cluster, stopping=reason), "stopped", f"the cluster was stopped: {reason}", now, out)
        present = {name: host for name, host in cluster.hosts.items() if host.phase is not HostPhase.LOST}
        runs = any(worker.job for worker in cluster.workers.values())
        cluster = replace(
            cluster,
            workers=cluster.workers
            | {w: replace(worker, state=WorkerState.STOPPED) for w, worker in cluster.workers.items()},
            hosts={name: replace(host, phase=HostPhase.DRAINING) for name, host in present.items()},
            stopped=PersistentSet(cluster.workers),
            starting=EMPTY,
            unregistered=EMPTY,
            failed=EMPTY,
            probing={},
            trial=None,
            setup_by=NEVER,
            stall=None,
            wake_at=NEVER,
            linger_until=cluster.linger_until if runs else 0.0,
        )
    if event.within is not None and cluster.linger_until:
        last = min(cluster.linger_last, now + event.within)
        cluster = replace(cluster, linger_until=min(cluster.linger_until, last), linger_last=last)
    if event.within is not None:
        end, known = now + event.within, cluster.ending_nodes
        nodes = [name for name in cluster.hosts if host_lifecycle.has_script_workers(cluster, name)]
        cluster = replace(cluster, ending_nodes={name: min(end, known.get(name, end)) for name in nodes})
    return cluster


def retire(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """End agents whose workers' programs have ended or were killed, and the node of a script. The last agents have a deadline."""
    busy = {w.host for w, worker in cluster.workers.items() if worker.job} if cluster.linger_until else set()
    nodes = {name for name in cluster.hosts if host_lifecycle.has_script_workers(cluster, name)}
    busy |= nodes - cluster.disconnected.keys()
    idle = [name for name in cluster.hosts if name not in cluster.ending_hosts and name not in busy]
    if idle:
        out.extend(cmd.StopAgent(name) for name in idle)
        end_by = now + cluster.limits.timeouts.close
        return replace(cluster, ending_hosts=cluster.ending_hosts.union(idle), agents_end_by=end_by)
    if now >= cluster.agents_end_by:
        for name in [name for name in cluster.hosts if name in cluster.ending_hosts]:
            cluster = losses.host_lost(cluster, name, "it did not end in time", now, out)
        cluster = replace(cluster, agents_end_by=NEVER)
    return cluster
