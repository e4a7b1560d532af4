"""Workers that no abort wakes end themselves. If no other worker holds the training state, one of them keeps it on disk first.

A worker of the same host reads it from there, and then holds it like any other.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import jobs, stage_deadlines
from nbelastic.core.state import ClusterState, HostPhase, KeptState, Stage
from nbelastic.core.state_holders import delete_kept_state, holders, keeper, state_lives
from nbelastic.protocol import events as ev

Commands = list[cmd.Command]


def worker_hung(cluster: ClusterState, event: ev.WorkerHung, now: float, out: Commands) -> ClusterState:
    """How is it to end? As long as it is open whether others still hold the state it gets no answer, and asks again."""
    w = event.worker
    if event.keeping:
        return stage_deadlines.mark_working(cluster, w, now)
    if w in cluster.member_set:
        cluster = replace(cluster, hung=cluster.hung | {w})
    is_kept = cluster.kept_state is not None and cluster.kept_state.commit >= event.commit
    if w in cluster.stopped or not cluster.workers[w].has_state or is_kept or not _is_formed(cluster):
        out.append(cmd.EndHungWorker(w))
        return cluster
    others = [o for o in holders(cluster) if o != w]
    awake = [o for o in others if o not in cluster.hung]
    if any(cluster.stage is not Stage.GATHERING or o not in cluster.awaiting for o in awake):
        out.append(cmd.EndHungWorker(w))
    elif not awake and w == min((w, *others)):
        out.append(cmd.EndHungWorker(w, keep=True))
    return cluster


def _is_formed(cluster: ClusterState) -> bool:
    return cluster.active is not None and cluster.active.formed


def state_kept(cluster: ClusterState, event: ev.StateKept, out: Commands) -> ClusterState:
    """The state is safe: the worker may end."""
    w, job = event.worker, cluster.active
    out.append(cmd.EndHungWorker(w))
    if job is None or job.name != event.job or not job.formed:
        out.append(cmd.DeleteKeptState(w))
        return cluster
    old = cluster.kept_state
    if old is not None and old.commit >= event.commit:
        if old.by != w:
            out.append(cmd.DeleteKeptState(w))
        return cluster
    cluster = delete_kept_state(cluster, out)
    text = f"{w} hangs and alone holds the training state: it has kept commit {event.commit} on {w.host}"
    out.append(cmd.Record("state-kept", text, host=w.host, worker=str(w), generation=cluster.generation))
    return replace(cluster, kept_state=KeptState(w, event.commit))


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """What was kept on a host is lost with it."""
    name = keeper(cluster)
    host = cluster.hosts.get(name)
    if host is not None and host.phase in (HostPhase.UP, HostPhase.DRAINING):
        return cluster
    cluster = replace(cluster, kept_state=None)
    if state_lives(cluster):
        return cluster
    return jobs.end(cluster, "failed", f"the training state was kept on {name}, which was lost", now, out)
