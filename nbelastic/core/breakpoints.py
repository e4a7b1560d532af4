"""Workers whose programs wait in the debugger for a user. Others wait for them, and no member stalls."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, rank_text, with_worker
from nbelastic.protocol import program_events as pev
from nbelastic.protocol.ids import WorkerId


def hold(cluster: ClusterState) -> bool:
    """Whether a member waits in the debugger, so that no member can be blamed for being late."""
    return any(cluster.workers[w].breakpoint_at for w in cluster.members if w in cluster.workers)


def reached(cluster: ClusterState, event: pev.BreakpointReached, out: Commands) -> ClusterState:
    """A program has come to a breakpoint, or to the next line in the debugger."""
    w, worker = event.worker, cluster.workers[event.worker]
    if not worker.breakpoint_at:
        text = f"{rank_text(cluster, w)} waits at a breakpoint in {event.place}: %elastic_debug"
        out.append(cmd.Record("breakpoint", text, worker=str(w), generation=cluster.generation))
    return with_worker(cluster, replace(worker, breakpoint_at=event.place or "the program"))


def left(cluster: ClusterState, w: WorkerId) -> ClusterState:
    """The program goes on."""
    return with_worker(cluster, replace(cluster.workers[w], breakpoint_at=""))
