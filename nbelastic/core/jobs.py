"""The beginning and the end of a job, and of its program on each worker."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle, provisioning, setup_cells
from nbelastic.core.commands import Commands
from nbelastic.core.halt import Halt
from nbelastic.core.host_slots import workers_on
from nbelastic.core.persistent import EMPTY, PersistentDict, PersistentSet
from nbelastic.core.state import NO_BREAKS, ClusterState, HostPhase, Job, Stage, WorkerState
from nbelastic.core.state_holders import delete_kept_state, keeper, last_writer
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def refusal(cluster: ClusterState) -> tuple[str, str] | None:
    """The outcome of a job that cannot begin, and the reason; None: it can."""
    if cluster.stopping:
        return "stopped", f"the cluster is stopping: {cluster.stopping}"
    if cluster.present_job:
        return "failed", f"{cluster.present_job} is still running: wait for it or stop it first"
    return None


def submit(cluster: ClusterState, name: str, now: float, out: Commands) -> ClusterState:
    """Begin a job: run its program on every worker that is ready."""
    if cluster.job is not None and cluster.job.name == name:
        return cluster
    problem = refusal(cluster)
    if problem:
        out.append(cmd.EndJob(name, *problem, ()))
        return cluster
    out.append(cmd.Record("job-started", f"{name} was submitted"))
    workers, starting, without_setup = dict(cluster.workers.items()), [*cluster.starting], []
    for w, worker in cluster.workers.items():
        if worker.state in (WorkerState.READY, WorkerState.FAILED, WorkerState.SUCCEEDED) and not worker.failed_cell:
            workers[w] = replace(worker, state=WorkerState.READY, failures=0, reason="")
            if not worker.job and setup_cells.next_cell(cluster, worker) is not None:
                without_setup.append(w)
            elif not worker.job:
                out.append(cmd.RunProgram(w, name))
                workers[w] = replace(workers[w], job=name, has_state=False, generation=0, program=0)
                starting.append(w)
    cluster = replace(
        cluster,
        job=Job(name),
        script=None,
        workers=PersistentDict(workers),
        starting=PersistentSet(starting),
        failed=PersistentSet(w for w in cluster.failed if workers[w].failed_cell),
        resets=0,
        settling_since=now,
    )
    for w in without_setup:
        cluster = setup_cells.run_next(cluster, w, now, out)
    return cluster


def linger(cluster: ClusterState, now: float) -> ClusterState:
    """Set deadlines for programs that were asked to stop. Those with the training state may write a last checkpoint."""
    timeouts = cluster.limits.timeouts
    last = now + max(timeouts.leave, timeouts.stop)
    return replace(cluster, linger_until=now + timeouts.leave, linger_last=last)


def finish(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """End the job if all members have finished, or without a world all workers."""
    job = cluster.active
    if job is None or not (job.succeeded or job.ended):
        return cluster
    if not job.ended >= cluster.member_set:
        return cluster
    if not (job.succeeded or job.formed) and any(worker.job == job.name for worker in cluster.workers.values()):
        return cluster
    if not job.ended:
        return end(cluster, "failed", "every rank that had finished was lost before its program ended", now, out)
    missing = len(frozenset(job.ranks) - job.ended) if job.ranks else job.at_once - len(job.ended)
    count = len(job.ranks) or job.at_once
    reason = f"{missing} of {count} ranks did not finish" if missing > 0 else "every rank finished"
    return end(cluster, "succeeded", reason, now, out)


def abort_generation(cluster: ClusterState, why: str, out: Commands) -> ClusterState:
    """Abort all members of the present generation, and of the prepared one."""
    members, generation = cluster.members, cluster.generation
    if cluster.next_formation is not None:  # an abort of a generation aborts the older ones too
        generation = cluster.next_formation.generation
        others = cluster.workers.keys() - cluster.stopped - cluster.member_set
        members += tuple(w for w in cluster.next_formation.members if w in others)
    if members:
        out.append(cmd.AbortWorld(generation, members, why))
    return replace(cluster, generation=generation, next_formation=None, entered_next=EMPTY)


def forget_kept_state(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Delete the kept state. A draining host that stayed only to keep it leaves."""
    name = keeper(cluster)
    cluster = delete_kept_state(cluster, out)
    if name in cluster.hosts and cluster.hosts[name].phase is HostPhase.DRAINING:
        cluster = provisioning.drain_workers(cluster, workers_on(cluster, name), now, out)
        cluster = host_lifecycle.remove_if_empty(cluster, name, out)
    return cluster


def end(
    cluster: ClusterState, outcome: str, reason: str, now: float, out: Commands, *, culprit: WorkerId | None = None
) -> ClusterState:
    """End the job. Workers that still run its program are asked to stop, and killed by `linger`'s deadlines."""
    job = cluster.active
    if job is None:
        return cluster
    inside = tuple(w for w, worker in cluster.workers.items() if worker.job == job.name)
    if inside:
        if outcome != "succeeded":
            cluster = abort_generation(cluster, reason, out)
        if job.trial:  # the last checkpoint is the old program's
            out.append(cmd.KeepProgram(job.program, inside))
        out.append(cmd.StopProgram(job.name, inside, reason, culprit, last_writer(cluster, culprit)))
    older = any(worker.job not in ("", job.name) for worker in cluster.workers.values())  # programs of earlier jobs
    ranks = job.ranks or tuple(sorted(job.ended))
    # The record first: a client that waits for the job then finds it in the event log.
    out.append(cmd.Record(f"job-{outcome}", f"{job.name} {outcome}: {reason}", worker=str(culprit or "")))
    out.append(cmd.EndJob(job.name, outcome, reason, ranks, culprit))
    cluster = forget_kept_state(cluster, now, out)
    leaving = sorted(cluster.leaving - inside)  # the others may write a last checkpoint first
    cluster = replace(
        cluster,
        job=replace(job, outcome=outcome, reason=reason, trial=0),
        hung=EMPTY,
        stage=Stage.GATHERING,
        members=(),
        member_set=EMPTY,
        formation=None,
        next_formation=None,
        entered_next=EMPTY,
        cancelled_formation=None,
        awaiting=EMPTY,
        newcomers=EMPTY,
        leaving=EMPTY,
        suspects=EMPTY,
        unexplained_breaks=NO_BREAKS,
        halt=Halt(),
        change_after=0.0,
        postponements=0,
        unanswered={},
        failed_formations=0,
        wait=None,
        starting=PersistentSet(w for w in cluster.starting if not cluster.workers[w].job),
        too_few_since=None,
        reason_until=NEVER,
        linger_until=cluster.linger_until if older else 0.0,
    )
    cluster = linger(cluster, now) if inside else cluster
    return provisioning.provision(provisioning.stop_workers(cluster, leaving, out), now, out)
