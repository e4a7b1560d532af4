"""Who holds the job's training state: workers in the elastic loop, or a disk on which the last of them has kept it."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, Worker
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId

Commands = list[cmd.Command]


def holders(cluster: ClusterState) -> list[WorkerId]:
    """Workers that do."""
    return [w for ids in (cluster.members, cluster.newcomers) for w in ids if cluster.workers[w].has_state]


def state_lives(cluster: ClusterState, without: Collection[WorkerId] = ()) -> bool:
    """Whether the job's training state, if there is one yet, is somewhere else than with these workers."""
    job = cluster.active
    if job is None or not job.formed or cluster.kept_state is not None:
        return True
    return any(w not in without for w in holders(cluster))


def alone_holds_state(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether the job's training state would be lost with it."""
    return cluster.workers[w].has_state and not state_lives(cluster, (w,))


def holds_newest_state(cluster: ClusterState, old: Worker, event: ev.WorkerReady) -> bool:
    """Whether a worker that says so holds the newest state: not if worlds have formed without it since."""
    job, kept = cluster.active, cluster.kept_state
    if not event.holds or job is None or not job.formed or old.id in cluster.member_set:
        return event.holds
    is_heir = kept is not None and (kept.reader, kept.commit) == (old.id, event.commit)
    return is_heir or event.since >= cluster.last_formed


def keeper(cluster: ClusterState) -> str:
    """The host on whose disk the state is; empty: none."""
    return cluster.kept_state.by.host if cluster.kept_state is not None else ""


def assign_kept_state(cluster: ClusterState, out: Commands) -> ClusterState:
    """A worker of that host which waits for a world reads the state."""
    kept = cluster.kept_state
    if kept is None or holders(cluster):
        return cluster
    here = [w for ids in (cluster.members, cluster.newcomers) for w in ids]
    if kept.reader in here:
        return cluster
    heir = min(
        (w for w in here if w.host == kept.by.host), key=lambda w: (cluster.workers[w].failures, w), default=None
    )
    if heir is None:
        return cluster
    out.append(cmd.LoadKeptState(heir, kept.by, kept.commit))
    return replace(cluster, kept_state=replace(kept, reader=heir))


def unassign_kept_state(cluster: ClusterState, worker: Worker) -> ClusterState:
    """An heir that says that it holds nothing has not heard that it is to read: it is told again."""
    kept = cluster.kept_state
    if kept is None or kept.reader != worker.id or worker.has_state:
        return cluster
    return replace(cluster, kept_state=replace(kept, reader=None))


def delete_kept_state(cluster: ClusterState, out: Commands) -> ClusterState:
    """Workers hold the state again, or nobody needs it."""
    if cluster.kept_state is None:
        return cluster
    out.append(cmd.DeleteKeptState(cluster.kept_state.by))
    return replace(cluster, kept_state=None)
