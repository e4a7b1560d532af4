"""Silent hosts, and workers that are unresponsive although their processes run: when they are lost or replaced."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import losses
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, with_worker
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId


def is_host_lost(
    silence: float, since_commit: float | None, since_cut_off: float | None, *, most: float, lease: float
) -> bool:
    """Whether a host that has sent nothing for `silence` seconds is lost, if `most` are allowed.

    `since_commit`: seconds since the last commit of a world with members on this host. A commit needs all members, so it shows
    that the host lives. `since_cut_off`: seconds since the driver received nothing from any host. Then the network of its own
    machine may be down, and no host could replace another one. None: there is no such world, or no such time. After the
    `lease` the host has ended by itself.
    """
    if silence > lease:
        return True
    excuses = [seconds for seconds in (since_commit, since_cut_off) if seconds is not None]
    return min([silence, *excuses]) > most


def is_cut_off(silences: Collection[float], *, quiet: float) -> bool:
    """Whether the driver receives nothing from any host that is up: all are silent for more than `quiet` seconds.

    `quiet` is less than the silence after which a host is lost: that is to be noticed before the first one is lost.
    """
    return min(silences, default=0.0) > quiet


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
