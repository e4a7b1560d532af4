"""Setup cells: what each worker must run before it is ready.

A cell is tried first on the workers that are ready, and kept only if it succeeds on one of them. Each kept cell has
its own version, and each worker's record has the versions that it has run. So the cells that a worker lacks are always
known.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, SetupCell, SetupTrial, Worker, WorkerState, with_worker, without
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def lacking(cluster: ClusterState, worker: Worker) -> SetupCell | None:
    """The first kept cell that this worker has not run; None: it is set up."""
    if not cluster.setup:
        return None
    return next((cell for cell in cluster.setup if cell.version not in worker.ran), None)


def next_cell(cluster: ClusterState, worker: Worker) -> SetupCell | None:
    """The cell that the worker has to run next, also one on trial, so that it need not wait for the verdict."""
    cell, trial = lacking(cluster, worker), cluster.trial
    if cell is not None or trial is None:
        return cell
    return None if trial.cell.version in worker.ran or worker.id in trial.failed else trial.cell


def submit(cluster: ClusterState, event: ev.SetupSubmitted, now: float, out: Commands) -> ClusterState:
    """Try a cell on the workers that are ready, and on those on which an earlier version of it failed."""
    if cluster.stopping or cluster.active or cluster.trial is not None:
        return cluster  # the caller notices that no trial has begun
    cell = SetupCell(event.key, event.source, event.version, event.pushed)
    ready = [w for w, worker in cluster.workers.items() if worker.state is WorkerState.READY and not worker.job]
    failed = [w for w, worker in cluster.workers.items() if worker.failed_cell and worker.state is WorkerState.FAILED]
    chosen = ready + [w for w in failed if not ready or cluster.workers[w].failed_cell == event.key]
    cluster = replace(cluster, trial=SetupTrial(cell))
    for w in chosen:
        cluster = _run(cluster, w, cell, now, out)
    return cluster


def clear(cluster: ClusterState, key: str, now: float, out: Commands) -> ClusterState:
    """Forget one cell or, without a key, all. Later workers do not run it; its effects on the present workers stay."""
    kept = tuple(cell for cell in cluster.setup if key and cell.key != key)
    if kept == cluster.setup:
        return cluster
    what = f"setup cell {key} was" if key else "all setup cells were"
    out.append(cmd.Record("setup-changed", f"{what} cleared"))
    return _catch_up(replace(cluster, setup=kept), now, out)


def worker_registered(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """A new worker can run code: run the setup cells and then, if there is a job, its program."""
    worker = cluster.workers[w]
    if worker.state is not WorkerState.STARTING or worker.registered:
        return cluster
    cluster = without(cluster, (w,), "unregistered")
    return _advance(with_worker(cluster, replace(worker, registered=True)), w, now, out)


def setup_ended(cluster: ClusterState, event: ev.SetupEnded, now: float, out: Commands) -> ClusterState:
    """A worker has run a cell. Failures of a trial are judged when all workers have ended."""
    w, trial = event.worker, cluster.trial
    worker = cluster.workers[w]
    if worker.state is not WorkerState.STARTING or worker.running_cell != event.version:
        return cluster
    worker = replace(worker, running_cell=0)
    if trial is not None and trial.cell.version == event.version:
        if event.error:
            return with_worker(replace(cluster, trial=replace(trial, failed=trial.failed | {w: event.error})), worker)
        cluster = replace(cluster, trial=replace(trial, succeeded=trial.succeeded + 1))
        worker = _with_version(cluster, worker, event.version)
        cluster = with_worker(cluster, worker)
        return cluster if lacking(cluster, worker) else _advance(cluster, w, now, out)
    if event.error:
        key = next((cell.key for cell in cluster.setup if cell.version == event.version), "")
        if not key:  # the cell was cleared or replaced meanwhile
            return _advance(with_worker(cluster, worker), w, now, out)
        return _fail(with_worker(cluster, worker), w, key, event.error, out)
    return _advance(with_worker(cluster, _with_version(cluster, worker, event.version)), w, now, out)


def _with_version(cluster: ClusterState, worker: Worker, version: int) -> Worker:
    """The worker, which has run this version of a cell. Versions that are no longer kept are forgotten."""
    cells = cluster.setup if cluster.trial is None else (*cluster.setup, cluster.trial.cell)
    return replace(worker, ran=(worker.ran & {cell.version for cell in cells}) | {version})


def progress(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """End a trial whose workers have all ended."""
    trial = cluster.trial
    if trial is None:
        return cluster
    ended = list(takewhile(lambda w: not _runs(cluster, w, trial.cell.version), trial.running))
    if len(ended) == len(trial.running):
        return _judge(cluster, now, out)
    return replace(cluster, trial=replace(trial, running=trial.running - ended)) if ended else cluster


def overdue(cluster: ClusterState, now: float) -> tuple[list[WorkerId], ClusterState]:
    """Workers whose cell has run for too long, and the state with the next such deadline."""
    limit = cluster.limits.timeouts.setup
    busy = ((w, worker) for w, worker in cluster.workers.items() if worker.running_cell and w in cluster.starting)
    ends = {w: worker.cell_since + limit for w, worker in busy}
    late = [w for w, end in ends.items() if now >= end]
    return late, replace(cluster, setup_by=min((end for end in ends.values() if now < end), default=NEVER))


def _runs(cluster: ClusterState, w: WorkerId, version: int) -> bool:
    worker = cluster.workers.get(w)
    return worker is not None and worker.state is WorkerState.STARTING and worker.running_cell == version


def run_next(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """Let a worker without a program run its next cell or the active job's program, unless the job is about to end."""
    job, worker = cluster.active, cluster.workers[w]
    if worker.state is not WorkerState.READY or worker.job:
        return cluster
    cell = next_cell(cluster, worker)
    if cell is not None:
        return _run(cluster, w, cell, now, out)
    if job is None or job.succeeded or job.ended:
        return cluster
    out.append(cmd.RunProgram(w, job.name))
    worker = replace(worker, job=job.name, generation=0, program=job.program)
    return with_worker(replace(cluster, starting=cluster.starting | {w}), worker)


def fail_worker(cluster: ClusterState, w: WorkerId, reason: str) -> ClusterState:
    """Keep the worker alive, for inspection, but out of this job."""
    worker = replace(cluster.workers[w], state=WorkerState.FAILED, reason=reason)
    return with_worker(replace(cluster, failed=cluster.failed | {w}), worker)


def _run(cluster: ClusterState, w: WorkerId, cell: SetupCell, now: float, out: Commands) -> ClusterState:
    out.append(cmd.RunSetup(w, cell.version, cell.source, cell.pushed))
    worker = replace(cluster.workers[w], state=WorkerState.STARTING, failed_cell="", reason="")
    worker = replace(worker, running_cell=cell.version, cell_since=now)
    trial = cluster.trial
    if trial is not None and trial.cell == cell:
        trial = replace(trial, running=trial.running | {w}, tried=trial.tried + 1)
    setup_by = min(cluster.setup_by, now + cluster.limits.timeouts.setup)
    cluster = replace(cluster, trial=trial, starting=cluster.starting | {w}, setup_by=setup_by)
    return with_worker(without(cluster, (w,), "failed"), worker)


def _advance(cluster: ClusterState, w: WorkerId, now: float, out: Commands) -> ClusterState:
    """Run the worker's next cell; without one, the worker is ready."""
    worker = cluster.workers[w]
    cell = next_cell(cluster, worker)
    if cell is not None:
        return _run(cluster, w, cell, now, out)
    if not worker.was_ready:
        out.append(cmd.Record("worker-ready", f"{w} is ready", host=w.host, worker=str(w)))
        worker = replace(worker, since=now, was_ready=True)
    worker = replace(worker, state=WorkerState.READY, failed_cell="", reason="")
    return run_next(with_worker(without(cluster, (w,), "starting", "failed"), worker), w, now, out)


def _fail(cluster: ClusterState, w: WorkerId, key: str, error: str, out: Commands) -> ClusterState:
    """Keep the worker out of jobs until the cells change or it is restarted."""
    reason = f"setup cell {key} failed: {error}"
    out.append(cmd.Record("worker-failed", f"{w}: {reason}", host=w.host, worker=str(w)))
    cluster = fail_worker(without(cluster, (w,), "starting"), w, reason)
    return with_worker(cluster, replace(cluster.workers[w], failed_cell=key, was_ready=False))


def _judge(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Keep or drop the cell: all workers that tried it have ended. A cell that no worker could try is kept."""
    trial = cluster.trial
    assert trial is not None
    cell, failed = trial.cell, {w: error for w, error in trial.failed.items() if w in cluster.workers}
    idle = [w for w, worker in cluster.workers.items() if worker.registered and not worker.running_cell]
    held = [w for w in idle if cluster.workers[w].state is WorkerState.STARTING]  # they wait for this verdict
    cluster = replace(cluster, trial=None)
    is_kept = bool(trial.succeeded) or not trial.tried
    if is_kept:
        cluster = replace(cluster, setup=_with(cluster.setup, cell))
        on = f"; it failed on {', '.join(map(str, sorted(failed)))}" if failed else ""
        out.append(cmd.Record("setup-changed", f"setup cell {cell.key} is kept{on}"))
    else:
        error = next(iter(trial.failed.values()), "the workers that ran it have ended")
        out.append(cmd.Record("setup-failed", f"setup cell {cell.key} failed everywhere and is not kept: {error}"))
    for w in held:
        fails = is_kept and w in failed
        cluster = _fail(cluster, w, cell.key, failed[w], out) if fails else _advance(cluster, w, now, out)
    return _catch_up(cluster, now, out, but=failed.keys()) if is_kept else cluster


def _with(cells: tuple[SetupCell, ...], new: SetupCell) -> tuple[SetupCell, ...]:
    """The cells with a new one: in the place of that with the same key or source, else at the end."""
    if new.pushed is not None:
        return _with_pushed(cells, new, frozenset(new.pushed.names))
    old = next((cell for cell in cells if cell.key == new.key), None)
    old = old or next((cell for cell in cells if cell.source == new.source), None)
    return (*cells, new) if old is None else tuple(new if cell is old else cell for cell in cells)


def _with_pushed(cells: tuple[SetupCell, ...], new: SetupCell, names: frozenset[str]) -> tuple[SetupCell, ...]:
    """The cells with newly pushed values, in the place of the first values that they replace.

    At the end, if values in between have some of the same names: a new worker takes the newest ones last.
    """
    replaced = [cell for cell in cells if cell.pushed is not None and names.issuperset(cell.pushed.names)]
    rest = tuple(cell for cell in cells if cell not in replaced)
    place = cells.index(replaced[0]) if replaced else len(rest)
    if any(cell.pushed is not None and not names.isdisjoint(cell.pushed.names) for cell in rest[place:]):
        place = len(rest)
    return (*rest[:place], new, *rest[place:])


def _catch_up(cluster: ClusterState, now: float, out: Commands, *, but: Collection[WorkerId] = ()) -> ClusterState:
    """Let idle and failed workers, except those in `but`, run the cells that they lack. Busy ones do so when they are idle."""
    for w, worker in tuple(cluster.workers.items()):
        if worker.failed_cell and worker.state is WorkerState.FAILED and w not in but:
            cluster = _advance(cluster, w, now, out)
        elif worker.state is WorkerState.READY and not worker.job:
            cell = lacking(cluster, worker)
            cluster = _run(cluster, w, cell, now, out) if cell is not None else cluster
    return cluster
