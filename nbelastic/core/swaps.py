"""The program of a job is replaced while it trains: at a commit, by one that takes over the training state.

1. The members stop at a commit (see `halts`). They leave their generation there, and all workers run the new program.
2. They meet in the next generation. There each stops at the first commit of the new program.
3. When all have come there, it is the program of the job.

If it fails before on any worker, all return to the old program, which goes on from the commit at which it was left. Programs
have numbers, which grow. 0 is the one that the job began with.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import generation_end
from nbelastic.core.commands import Commands
from nbelastic.core.reasons import Reason
from nbelastic.core.state import ClusterState, Stage, rank_text, with_reason, with_worker, without
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol.ids import WorkerId


def is_on_trial(cluster: ClusterState) -> bool:
    """Whether the members run a new program that has not come to its first commit on all of them."""
    return bool(cluster.active and cluster.active.trial)


def wanted(cluster: ClusterState) -> int:
    """The program that workers are to run."""
    job = cluster.active
    return 0 if job is None else job.trial or job.program


def submit(cluster: ClusterState, event: pev.SwapSubmitted, out: Commands) -> ClusterState:
    """Replace the program at the next commit. Without a job that trains, or beside another swap, the event is dropped."""
    job = cluster.active
    if job is None or job.succeeded or job.trial or cluster.halt.swap:
        return cluster
    out.append(cmd.Record("swap-requested", f"new program requested by {event.by}", generation=cluster.generation))
    return replace(cluster, halt=replace(cluster.halt, swap=event.program))


def cancel(cluster: ClusterState, program: int, now: float, out: Commands) -> ClusterState:
    """No client waits for the swap any more: drop it, or return to the old program."""
    if cluster.halt.swap == program:
        return replace(cluster, halt=replace(cluster.halt, swap=0))
    if cluster.active is not None and cluster.active.trial == program:
        return reject(cluster, "the client has left that waited for it", now, out)
    return cluster


def begin(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """The members stand still: they leave their generation there, and run the new program, as do newcomers that wait."""
    job, program, size = cluster.active, cluster.halt.swap, len(cluster.members)
    assert job is not None
    newcomers = tuple(sorted(cluster.newcomers))
    workers = cluster.members + newcomers
    out.append(cmd.TryProgram(program, cluster.generation, workers, on_trial=True))
    cluster = generation_end.leave_halt(replace(cluster, halt=replace(cluster.halt, swap=0)))
    cluster = _with_program(replace(cluster, job=replace(job, trial=program)), workers, program)
    cluster = _expect(cluster, newcomers, now)
    return with_reason(replace(cluster, stage=Stage.LEAVING, awaiting=cluster.member_set), Reason("swapping", of=size))


def other_program(cluster: ClusterState, event: ev.WorkerReady, out: Commands) -> ClusterState:
    """The report of a worker that waits for a world does not count, as it runs another program than the wanted one.

    An older program is replaced. A newer one is a trial that has failed: the worker reports again.
    """
    program = wanted(cluster)
    worker = cluster.workers[event.worker]
    if event.program > program or worker.program == program:  # it was asked already
        return cluster
    out.append(cmd.TryProgram(program, event.generation, (event.worker,), is_on_trial(cluster)))
    return with_worker(cluster, replace(worker, program=program))


def accept(cluster: ClusterState, out: Commands) -> ClusterState:
    """All members stand at the first commit of the new program: it is the job's."""
    job, program = cluster.active, wanted(cluster)
    assert job is not None
    text = f"{len(cluster.members)} workers train with the new program"
    out.append(cmd.Record("program-swapped", text, generation=cluster.generation))
    out.append(cmd.KeepProgram(program, _workers(cluster)))
    return replace(cluster, job=replace(job, program=program, trial=0))


def failed(cluster: ClusterState, event: pev.SwapFailed, now: float, out: Commands) -> ClusterState:
    """The new program has failed on one worker."""
    job, w = cluster.active, event.worker
    if job is None or job.trial != event.program:
        return cluster
    return reject(cluster, f"{rank_text(cluster, w)} raised {event.error}", now, out)


def reject(cluster: ClusterState, why: str, now: float, out: Commands) -> ClusterState:
    """All workers return to the old program, which goes on from the commit at which it was left."""
    job = cluster.active
    assert job is not None
    out.append(cmd.Record("swap-failed", f"the old program goes on: {why}", generation=cluster.generation))
    out.append(cmd.KeepProgram(job.program, _workers(cluster), rejected=job.trial, why=why))
    trying = [w for w in _workers(cluster) if cluster.workers[w].program == job.trial]
    cluster = _with_program(replace(cluster, job=replace(job, trial=0)), trying, job.program)
    cluster = _expect(cluster, cluster.newcomers & trying, now)
    if cluster.stage in (Stage.LEAVING, Stage.GATHERING):  # their reports so far are of the new program
        return replace(cluster, stage=Stage.GATHERING, awaiting=cluster.member_set)
    cluster = replace(cluster, resets=cluster.resets - 1)  # this break does not count as a failure of the training
    return generation_end.break_generation(cluster, f"the new program failed: {why}", now, out)


def _expect(cluster: ClusterState, newcomers: Collection[WorkerId], now: float) -> ClusterState:
    """These newcomers run another program, and will report again."""
    return generation_end.demote(without(cluster, newcomers, "newcomers"), newcomers, now)


def _with_program(cluster: ClusterState, workers: Collection[WorkerId], program: int) -> ClusterState:
    """These workers were asked to run this program."""
    changed = {w: replace(cluster.workers[w], program=program) for w in workers}
    return replace(cluster, workers=cluster.workers | changed)


def _workers(cluster: ClusterState) -> tuple[WorkerId, ...]:
    job = cluster.active
    return tuple(w for w, worker in cluster.workers.items() if job is not None and worker.job == job.name)
