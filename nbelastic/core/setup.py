"""Setup cells: what each worker has to have run before it is ready.

A cell is tried first, on the workers that are ready, and kept only if it succeeded on one of them. Each kept cell has a
version of its own, and each worker knows the versions that it has run: so what a worker is lacking is known at any time.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import SetupCell, Trial, Worker, WorkerState, World, less, put
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]


def lacking(world: World, worker: Worker) -> SetupCell | None:
    """The first kept cell that this worker has not run; None if it is set up."""
    if not world.setup:
        return None
    return next((cell for cell in world.setup if cell.version not in worker.ran), None)


def due(world: World, worker: Worker) -> SetupCell | None:
    """The next cell that it is to run: a kept one, or the one on trial, so that a newcomer need not wait for the verdict."""
    cell, trial = lacking(world, worker), world.trial
    if cell is not None or trial is None:
        return cell
    return None if trial.cell.version in worker.ran or worker.id in trial.failed else trial.cell


def submit(world: World, event: ev.SetupSubmitted, now: float, out: Commands) -> World:
    """Try a cell on the workers that are ready, and on those on which an earlier version of it failed."""
    if world.stopping or world.active or world.trial is not None:
        return world  # the caller sees that its trial has not begun
    cell = SetupCell(event.key, event.source, event.version)
    ready = [w for w, worker in world.workers.items() if worker.state is WorkerState.READY and not worker.job]
    failed = [w for w, worker in world.workers.items() if worker.failed_cell and worker.state is WorkerState.FAILED]
    chosen = ready + [w for w in failed if not ready or world.workers[w].failed_cell == event.key]
    world = replace(world, trial=Trial(cell))
    for w in chosen:
        world = _run(world, w, cell, now, out)
    return world


def clear(world: World, key: str, now: float, out: Commands) -> World:
    """Forget one cell, or without a key all: no later worker runs it. What it did on the present workers is not undone."""
    kept = tuple(cell for cell in world.setup if key and cell.key != key)
    if kept == world.setup:
        return world
    what = f"setup cell {key} was" if key else "all setup cells were"
    out.append(cmd.Record("setup-changed", f"{what} cleared"))
    return _catch_up(replace(world, setup=kept), now, out)


def registered(world: World, w: WorkerId, now: float, out: Commands) -> World:
    """Its engine takes code: it runs the cells, and then the program if a job is on."""
    worker = world.workers[w]
    if worker.state is not WorkerState.STARTING or worker.registered:
        return world
    return _advance(put(world, replace(worker, registered=True)), w, now, out)


def ended(world: World, event: ev.SetupEnded, now: float, out: Commands) -> World:
    """A worker has run a cell. In a trial, what failed is judged when all have ended."""
    w, trial = event.worker, world.trial
    worker = world.workers[w]
    if worker.state is not WorkerState.STARTING or worker.cell != event.version:
        return world
    worker = replace(worker, cell=0)
    if trial is not None and trial.cell.version == event.version:
        if event.error:
            return put(replace(world, trial=replace(trial, failed={**trial.failed, w: event.error})), worker)
        world = replace(world, trial=replace(trial, succeeded=trial.succeeded + 1))
        worker = replace(worker, ran=worker.ran | {event.version})
        return put(world, worker) if lacking(world, worker) else _advance(put(world, worker), w, now, out)
    if event.error:
        key = next((cell.key for cell in world.setup if cell.version == event.version), "")
        if not key:  # it was cleared or replaced meanwhile
            return _advance(put(world, worker), w, now, out)
        return _fail(put(world, worker), w, key, event.error, out)
    return _advance(put(world, replace(worker, ran=worker.ran | {event.version})), w, now, out)


def progress(world: World, now: float, out: Commands) -> World:
    """End a trial for which nobody runs its cell any more; bring workers up to date that were busy before."""
    trial = world.trial
    if trial is not None:
        running = frozenset(w for w in trial.running if _runs(world, w, trial.cell.version))
        if not running:
            return _judge(world, now, out)
        return world if running == trial.running else replace(world, trial=replace(trial, running=running))
    return _catch_up(world, now, out, but=world.failed) if world.outdated else world


def overdue(world: World, now: float) -> tuple[list[WorkerId], World]:
    """Workers whose cell has run for too long, and the world with the time at which the next one will have."""
    limit = world.limits.timeouts.setup
    ends = {w: worker.cell_since + limit for w, worker in world.workers.items() if worker.cell and w in world.starting}
    late = [w for w, end in ends.items() if now >= end]
    return late, replace(world, setup_by=min((end for end in ends.values() if now < end), default=NEVER))


def _runs(world: World, w: WorkerId, version: int) -> bool:
    worker = world.workers.get(w)
    return worker is not None and worker.state is WorkerState.STARTING and worker.cell == version


def run_next(world: World, w: WorkerId, now: float, out: Commands) -> World:
    """A worker without a program takes the active job's, unless that is about to end."""
    job, worker = world.active, world.workers[w]
    if worker.state is not WorkerState.READY or worker.job:
        return world
    cell = due(world, worker)
    if cell is not None:
        return _run(world, w, cell, now, out)
    if job is None or job.succeeded or job.ended:
        return world
    out.append(cmd.RunProgram(w, job.name))
    return put(replace(world, starting=world.starting | {w}), replace(worker, job=job.name, epoch=0))


def fail_worker(world: World, w: WorkerId, reason: str) -> World:
    """It lives, for inspection, but is of no use to this job."""
    worker = replace(world.workers[w], state=WorkerState.FAILED, reason=reason)
    return put(replace(world, failed=world.failed | {w}), worker)


def _run(world: World, w: WorkerId, cell: SetupCell, now: float, out: Commands) -> World:
    out.append(cmd.RunSetup(w, cell.version, cell.source))
    worker = replace(
        world.workers[w], state=WorkerState.STARTING, cell=cell.version, cell_since=now, failed_cell="", reason=""
    )
    trial = world.trial
    if trial is not None and trial.cell == cell:
        trial = replace(trial, running=trial.running | {w}, tried=trial.tried + 1)
    world = replace(
        world,
        trial=trial,
        starting=world.starting | {w},
        failed=less(world.failed, frozenset({w})),
        setup_by=min(world.setup_by, now + world.limits.timeouts.setup),
    )
    return put(world, worker)


def _advance(world: World, w: WorkerId, now: float, out: Commands) -> World:
    """The next cell that it is to run; or it is ready."""
    worker = world.workers[w]
    cell = due(world, worker)
    if cell is not None:
        return _run(world, w, cell, now, out)
    if not worker.was_ready:
        out.append(cmd.Record("worker-ready", f"{w} is ready", host=w.host, worker=str(w)))
        worker = replace(worker, since=now, was_ready=True)
    worker = replace(worker, state=WorkerState.READY, failed_cell="", reason="")
    world = put(replace(world, starting=world.starting - {w}, failed=less(world.failed, frozenset({w}))), worker)
    return run_next(world, w, now, out)


def _fail(world: World, w: WorkerId, key: str, error: str, out: Commands) -> World:
    """It takes part in no job until the cells change, or until it is restarted."""
    reason = f"setup cell {key} failed: {error}"
    out.append(cmd.Record("worker-failed", f"{w}: {reason}", host=w.host, worker=str(w)))
    world = fail_worker(replace(world, starting=world.starting - {w}), w, reason)
    return put(world, replace(world.workers[w], failed_cell=key, was_ready=False))


def _judge(world: World, now: float, out: Commands) -> World:
    """All who tried the cell have ended. One on which nobody was ready to try it is kept unseen."""
    trial = world.trial
    assert trial is not None
    cell, failed = trial.cell, {w: error for w, error in trial.failed.items() if w in world.workers}
    idle = [w for w, worker in world.workers.items() if worker.registered and not worker.cell]
    held = [w for w in idle if world.workers[w].state is WorkerState.STARTING]  # they waited for this verdict
    world = replace(world, trial=None)
    is_kept = bool(trial.succeeded) or not trial.tried
    if is_kept:
        world = replace(world, setup=_with(world.setup, cell))
        on = f"; it failed on {', '.join(map(str, sorted(failed)))}" if failed else ""
        out.append(cmd.Record("setup-changed", f"setup cell {cell.key} is kept{on}"))
    else:
        error = next(iter(trial.failed.values()), "the workers that ran it have ended")
        out.append(cmd.Record("setup-failed", f"setup cell {cell.key} failed everywhere and is not kept: {error}"))
    for w in held:
        fails = is_kept and w in failed
        world = _fail(world, w, cell.key, failed[w], out) if fails else _advance(world, w, now, out)
    return _catch_up(world, now, out, but=failed.keys()) if is_kept else world


def _with(cells: tuple[SetupCell, ...], new: SetupCell) -> tuple[SetupCell, ...]:
    """In the place of the one with its key, or with its source; else at the end."""
    old = next((cell for cell in cells if cell.key == new.key), None)
    old = old or next((cell for cell in cells if cell.source == new.source), None)
    return (*cells, new) if old is None else tuple(new if cell is old else cell for cell in cells)


def _catch_up(world: World, now: float, out: Commands, *, but: Collection[WorkerId] = ()) -> World:
    """Idle workers run what they are lacking, and those that have failed are set up again, unless they are in `but`."""
    outdated = False
    for w, worker in tuple(world.workers.items()):
        if worker.failed_cell and worker.state is WorkerState.FAILED and w not in but:
            world = _advance(world, w, now, out)
        elif worker.state is WorkerState.READY and not worker.job:
            cell = lacking(world, worker)
            world = _run(world, w, cell, now, out) if cell is not None else world
        elif worker.job and worker.state is not WorkerState.STOPPED:
            outdated = outdated or lacking(world, worker) is not None
    return replace(world, outdated=outdated)
