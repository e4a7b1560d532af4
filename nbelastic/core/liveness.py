"""Workers that are unresponsive although their processes run: when they are replaced, and what the status shows."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import losses
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, with_worker
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId


def worker_silent(cluster: ClusterState, event: ev.WorkerSilent, now: float, out: Commands) -> ClusterState:
    """Note that a worker is unresponsive: a call may hold Python's interpreter lock. Replace it after its deadline."""
    w, limits = event.worker, cluster.limits
    if w in cluster.stopped:  # it was asked to end, and has a deadline for that
        return cluster
    most = limits.timeouts.silent_idle if event.idle else limits.timeouts.silent
    process = event.state or ("uses no CPU time" if event.idle else "runs")
    text = f"no message from it for {event.seconds:.0f} s though its host answers; its process {process}"
    if event.seconds >= (most if limits.stall is None else limits.stall):
        return losses.replace_worker(cluster, w, f"{w} froze ({text})", now, out)
    if not cluster.workers[w].unresponsive:
        out.append(cmd.Record("worker-silent", f"{w}: {text}", host=w.host, worker=str(w)))
    return with_worker(cluster, replace(cluster.workers[w], unresponsive=text))


def worker_responded(cluster: ClusterState, w: WorkerId) -> ClusterState:
    return with_worker(cluster, replace(cluster.workers[w], unresponsive=""))
