"""Hung workers, which no abort wakes. Each ends itself; the last holder of the training state writes it to disk first.

A worker of the same host then reads it, and holds it like any other.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import jobs, stage_deadlines
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, KeptState, Stage
from nbelastic.core.state_holders import delete_kept_state, holders, keeper, state_lives
from nbelastic.protocol import events as ev


def worker_hung(cluster: ClusterState, event: ev.WorkerHung, now: float, out: Commands) -> ClusterState:
    """Answer a hung worker, which asks how to end. It asks again while the other holders are not known yet."""
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
    """A hung worker has written the training state to disk, so it may end."""
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
    """Forget the kept state if its host is lost. The job fails if that was the last copy."""
    name = keeper(cluster)
    host = cluster.hosts.get(name)
    if host is not None and host.is_up:
        return cluster
    cluster = replace(cluster, kept_state=None)
    if state_lives(cluster):
        return cluster
    return jobs.end(cluster, "failed", f"the training state was kept on {name}, which was lost", now, out)
