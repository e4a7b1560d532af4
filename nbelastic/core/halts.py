"""The members stop together at a commit: for cells that run there, for a new program, or because a client has paused.

All members are asked for their commits, as for a planned change (`reconfiguration`), and stop at the first commit that
none has passed. There the cells run, one after the other, in the middle of the program. Then all train on. The training
loses no step, whatever a cell does: if the world breaks in a cell, the members return to that commit.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generation_end, swaps
from nbelastic.core.commands import Commands
from nbelastic.core.halt import CommitCell, Halt
from nbelastic.core.persistent import EMPTY, PersistentSet
from nbelastic.core.reasons import Reason
from nbelastic.core.state import ClusterState, Stage, with_reason, without
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER

GRACE = 5.0  # seconds after a cell's time limit, at which the worker interrupts it; then the world breaks


def is_wanted(cluster: ClusterState) -> bool:
    halt = cluster.halt
    return bool(halt.cells or halt.swap or halt.paused_by or swaps.is_on_trial(cluster))


# ---- requests of clients ----


def submit_cell(cluster: ClusterState, event: ev.CommitCellSubmitted) -> ClusterState:
    """Run a cell at the next commit. Without a job that trains the event is dropped, which the driver notices."""
    job, halt = cluster.active, cluster.halt
    if job is None or job.succeeded:
        return cluster
    return replace(cluster, halt=replace(halt, cells=(*halt.cells, CommitCell(event.number, event.ranks, event.limit))))


def cancel_cell(cluster: ClusterState, number: int, out: Commands) -> ClusterState:
    """No client waits for the cell any more: drop it, or interrupt it if it runs."""
    halt = cluster.halt
    if halt.running and halt.cells[0].number == number:
        out.append(cmd.InterruptCell(number, tuple(halt.running)))
        return cluster
    return replace(cluster, halt=replace(halt, cells=tuple(cell for cell in halt.cells if cell.number != number)))


def pause(cluster: ClusterState, by: str, out: Commands) -> ClusterState:
    """Stop at the next commit, until `resume`."""
    halt = cluster.halt
    if cluster.active is None:
        return cluster
    if halt.paused_by:  # a training that makes steps is asked to stop earlier
        cluster = replace(cluster, halt=replace(halt, steps=0, steps_to=0))
        is_far = halt.steps_to and cluster.stage is Stage.HALTED and cluster.awaiting
        return generation_end.cancel_next(cluster, out) if is_far else cluster
    out.append(cmd.Record("paused", f"the training was paused by {by}", generation=cluster.generation))
    return replace(cluster, halt=replace(cluster.halt, paused_by=by))


def resume(cluster: ClusterState, by: str, out: Commands) -> ClusterState:
    if not cluster.halt.paused_by:
        return cluster
    out.append(cmd.Record("resumed", f"the training was resumed by {by}", generation=cluster.generation))
    return replace(cluster, halt=replace(cluster.halt, paused_by="", steps=0, steps_to=0))


def run_steps(cluster: ClusterState, event: ev.StepsRequested, out: Commands) -> ClusterState:
    """Train on for so many commits after the next halt, and pause again. If it is not paused, pause it."""
    halt = cluster.halt
    if not halt.paused_by:
        return pause(cluster, event.by, out)
    return replace(cluster, halt=replace(halt, steps=halt.steps + event.steps))


# ---- from training to the halt, and back ----


def ask(cluster: ClusterState, out: Commands) -> ClusterState:
    """Ask the members for their commits. They stop at the next one, which lasts until all have answered."""
    cluster = generation_end.ask_for_commits(cluster, out)
    cluster = replace(cluster, halt=replace(cluster.halt, asked=True))
    return with_reason(cluster, Reason("halting", of=len(cluster.members)))


def agree(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """All members have reported their commits: they stop after the highest, if that is still wanted."""
    if not is_wanted(cluster):
        return generation_end.cancel_next(cluster, out)
    cluster = replace(cluster, postponements=0, unanswered={}, halt=replace(cluster.halt, asked=False))
    return progress(halt_at(cluster, cluster.highest_acknowledged + 1, out), now, out)


def halt_at(cluster: ClusterState, commit: int, out: Commands) -> ClusterState:
    """The members stop at this commit of their generation."""
    out.append(cmd.HaltAt(cluster.generation, commit, cluster.members))
    halt = replace(cluster.halt, commit=commit)
    return replace(cluster, stage=Stage.HALTED, awaiting=cluster.member_set, halt=halt)


def worker_halted(cluster: ClusterState, event: ev.WorkerHalted) -> ClusterState:
    """A member has come to the agreed commit, and waits there."""
    if cluster.stage is not Stage.HALTED or event.commit != cluster.halt.commit:
        return cluster
    return without(cluster, (event.worker,), "awaiting")


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """While the members stand still, or are about to: run the next cell, go on being paused, or train on."""
    halt, size = cluster.halt, len(cluster.members)
    if cluster.awaiting:
        return _come_to_halt(cluster, out)
    if halt.running:
        return with_reason(cluster, Reason("in-cell", len(halt.running), size, cluster.generation, halt.commit))
    if swaps.is_on_trial(cluster):
        cluster = swaps.accept(cluster, out)
    while cluster.halt.cells:
        begun = _begin_cell(cluster, now, out)
        if begun.halt.running:
            return progress(begun, now, out)
        cluster = begun
    if halt.swap:
        return swaps.begin(cluster, now, out)
    if halt.paused_by and halt.steps:
        halt = replace(cluster.halt, steps=0, steps_to=max(halt.commit, halt.steps_to) + halt.steps)
        cluster = replace(cluster, halt=halt)
    if halt.paused_by and halt.steps_to > halt.commit:
        return progress(halt_at(cluster, halt.steps_to, out), now, out)
    if halt.paused_by:
        cluster = replace(cluster, halt=replace(cluster.halt, steps_to=0))
        return with_reason(cluster, Reason("paused", size, size, cluster.generation, halt.commit, text=halt.paused_by))
    return generation_end.cancel_next(cluster, out)


def _come_to_halt(cluster: ClusterState, out: Commands) -> ClusterState:
    """Not all members have come to the halt. All train on if it is not wanted any more, or if a cell wants an earlier one."""
    halt = cluster.halt
    if not is_wanted(cluster):
        return generation_end.cancel_next(cluster, out)
    if swaps.is_on_trial(cluster):
        return with_reason(cluster, Reason("swapping", of=len(cluster.members)))
    if halt.commit != halt.steps_to:
        return with_reason(cluster, Reason("halting", of=len(cluster.members)))
    if not halt.cells:
        reason = Reason("stepping", of=len(cluster.members), generation=cluster.generation, commit=halt.commit)
        return with_reason(cluster, reason)
    cluster = generation_end.cancel_next(cluster, out)
    return replace(cluster, halt=replace(cluster.halt, steps_to=halt.steps_to))  # the steps go on after the cell


def _begin_cell(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Run the first cell on its ranks. One whose ranks this world does not have is dropped."""
    halt, size = cluster.halt, len(cluster.members)
    cell = halt.cells[0]
    workers = tuple(cluster.members[rank] for rank in cell.ranks or range(size) if rank < size)
    if not workers:
        return replace(cluster, halt=_without_cell(halt))
    everywhere = len(workers) == size
    out.append(cmd.RunCommitCell(cell.number, cluster.generation, workers, cell.limit, everywhere))
    return replace(
        cluster, halt=replace(halt, running=PersistentSet(workers), ended={}, until=now + cell.limit + GRACE)
    )


def cell_ended(cluster: ClusterState, event: ev.CommitCellEnded, now: float, out: Commands) -> ClusterState:
    """A cell has ended on one rank. When it has ended on all, judge whether the ranks can train on together."""
    halt, w = cluster.halt, event.worker
    if w not in halt.running or halt.cells[0].number != event.number:
        return cluster
    halt = replace(halt, running=halt.running - {w}, ended={**halt.ended, w: (event.begun, event.changed)})
    if halt.running:
        return replace(cluster, halt=halt)
    why = _unequal(halt, len(cluster.members))
    cluster = replace(cluster, halt=_without_cell(halt))
    return generation_end.break_generation(cluster, why, now, out) if why else cluster


def _unequal(halt: Halt, size: int) -> str:
    """What a cell has done on some ranks only, if the ranks cannot train on together after it."""
    others = {0} if len(halt.ended) < size else set()
    begun = [begun for begun, _ in halt.ended.values()]
    if len({*begun} | others) > 1:
        return "a cell began a collective that not all ranks take part in"
    changes = [changed for _, changed in halt.ended.values() if changed]
    if 0 < len(changes) < size:
        return f"a cell changed the training state on {len(changes)} of {size} ranks, which receive it again"
    if len({*changes}) > 1:
        return "a cell changed the training state differently on the ranks, which receive it again"
    return ""


def act(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Break the world if a cell does not end: it hangs in a call that cannot be interrupted, such as a collective."""
    halt = cluster.halt
    if now < halt.until:
        return cluster
    limit = halt.cells[0].limit
    why = f"a cell did not end within {limit:g} s on {len(halt.running)} of {len(cluster.members)} ranks"
    return generation_end.break_generation(cluster, why, now, out)


def _without_cell(halt: Halt) -> Halt:
    return replace(halt, cells=halt.cells[1:], running=EMPTY, ended={}, until=NEVER)
