"""Who holds the job's training state: workers in the elastic loop, or the disk of a host (kept state)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, Stage, Worker
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId


def holders(cluster: ClusterState) -> Iterator[WorkerId]:
    """Workers that hold the training state, one at a time: often the first is enough."""
    return (w for ids in (cluster.members, cluster.newcomers) for w in ids if cluster.workers[w].has_state)


def last_writer(cluster: ClusterState, culprit: WorkerId | None) -> WorkerId | None:
    """Who writes the job's last checkpoint: rank 0 or, if it is lost or raises its own error, the next rank that can.

    Between worlds, that is the first rank with the newest commit. None: no worker holds the training state, or some have ended well.
    """
    if cluster.active is not None and cluster.active.succeeded:  # rank 0 may have written it, and ended
        return None
    found = [w for w in holders(cluster) if w != culprit]
    receive = [w for w in found if w.host not in cluster.disconnected and not cluster.workers[w].unresponsive]
    found = receive or found
    if cluster.stage in (Stage.GATHERING, Stage.FORMING):
        return max(found, key=lambda w: (cluster.workers[w].clean, cluster.workers[w].commit), default=None)
    return next(iter(found), None)


def state_lives(cluster: ClusterState, without: Collection[WorkerId] = ()) -> bool:
    """Whether the training state, if there is one, is held by others than the workers in `without`."""
    job = cluster.active
    if job is None or not job.formed or cluster.kept_state is not None:
        return True
    return any(w not in without for w in holders(cluster))


def state_may_live(cluster: ClusterState) -> bool:
    """The same, or a member of a generation that forms may just have received it: its report is awaited."""
    waits = cluster.stage in (Stage.GATHERING, Stage.FORMING) and any(w in cluster.awaiting for w in cluster.members)
    return state_lives(cluster) or waits


def alone_holds_state(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether the job's training state would be lost with the worker."""
    return cluster.workers[w].has_state and not state_lives(cluster, (w,))


def holds_newest_state(cluster: ClusterState, old: Worker, event: ev.WorkerReady) -> bool:
    """Whether a worker that claims the training state holds the newest: no world has formed without it since."""
    job, kept = cluster.active, cluster.kept_state
    if not event.holds_state or job is None or not job.formed or old.id in cluster.member_set:
        return event.holds_state
    is_reader = kept is not None and (kept.reader, kept.commit) == (old.id, event.commit)
    return is_reader or event.state_since >= cluster.last_formed


def keeper(cluster: ClusterState) -> str:
    """The host on whose disk the state is; empty: none."""
    return cluster.kept_state.by.host if cluster.kept_state is not None else ""


def assign_kept_state(cluster: ClusterState, out: Commands) -> ClusterState:
    """Let a worker on the host that keeps the training state read it, if no worker holds it."""
    kept = cluster.kept_state
    if kept is None or next(holders(cluster), None) is not None:
        return cluster
    waiting = [w for ids in (cluster.members, cluster.newcomers) for w in ids]
    if kept.reader in waiting:
        return cluster
    candidates = (w for w in waiting if w.host == kept.by.host)
    reader = min(candidates, key=lambda w: (cluster.workers[w].failures, w), default=None)
    if reader is None:
        return cluster
    out.append(cmd.LoadKeptState(reader, kept.by, kept.commit))
    return replace(cluster, kept_state=replace(kept, reader=reader))


def unassign_kept_state(cluster: ClusterState, worker: Worker) -> ClusterState:
    """Take the assignment back if the reader reports that it holds nothing: it did not receive the command."""
    kept = cluster.kept_state
    if kept is None or kept.reader != worker.id or worker.has_state:
        return cluster
    return replace(cluster, kept_state=replace(kept, reader=None))


def delete_kept_state(cluster: ClusterState, out: Commands) -> ClusterState:
    """Delete the kept state: workers hold it again, or it is not needed."""
    if cluster.kept_state is None:
        return cluster
    out.append(cmd.DeleteKeptState(cluster.kept_state.by))
    return replace(cluster, kept_state=None)
