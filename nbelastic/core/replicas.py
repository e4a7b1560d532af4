"""A rank whose training state differs from that of the other ranks, which must hold the same."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core import losses
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, rank_text
from nbelastic.protocol.program_events import ReplicaDiffered

CAUSES = (
    "its memory or its device may be faulty, or the program changes the model or the learning rate on this rank only"
)


def differs_text(commit: int) -> str:
    """The text about a rank whose values differ since this commit."""
    return f"has other values than the other ranks since commit {commit}"


def differed(cluster: ClusterState, event: ReplicaDiffered, now: float, out: Commands) -> ClusterState:
    """Report the rank. With `Limits.exclude_differing` its host is left out if its values were right at first.

    If all other members are on that host too, only the worker is replaced.
    """
    w, job = event.worker, cluster.active
    if job is None or event.generation != cluster.generation or w not in cluster.member_set:
        return cluster
    text = f"{rank_text(cluster, w)} {differs_text(event.commit)}"
    record = cmd.Record("replica-differs", f"{text}: {CAUSES}", host=w.host, worker=str(w), generation=event.generation)
    out.append(record)
    others = [m for m in cluster.members if m != w and cluster.workers[m].has_state]
    wanted = cluster.limits.exclude_differing and event.were_equal
    if not wanted or not others or job.succeeded or not cluster.has_world:
        return cluster
    if any(member.host != w.host for member in others):
        return losses.exclude_host(cluster, w.host, text, now, out, kind="host-lost")
    return losses.replace_worker(cluster, w, f"{w} is replaced, as {text}", now, out)
