"""`step(world, event, now) -> (world, commands)`: every decision about who trains with whom.

The shape is dask.distributed's `worker_state_machine` (stimulus in, instructions out); "not yet" always comes with its
reason, as in torchft's `quorum_compute`. Stale news is dropped first. Nothing in here waits, locks or calls back.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generations,
    hangs,
    jobs,
    liveness,
    mesh,
    networks,
    provisioning,
    reconfiguration,
    script,
    script_rounds,
    setup,
    stalls,
    starting,
    stopping,
    waits,
)
from nbelastic.core.holders import alone_holds_state, claims, unheard
from nbelastic.core.state import HostPhase, Stage, Worker, WorkerState, World, first, less, put
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.exit_codes import exit_text
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER

__all__ = ["deadline", "step"]

Commands = list[cmd.Command]


ABORTED = 1.0  # seconds that a member has to hear of an abort; a worker repeats its word after 2 s
YOUNG = 2.0  # seconds of life below which each death counts: nothing is forked again and again without a pause
UNEXPLAINED = 3  # breaks in a row at one commit that no death explains: then the program's own error ends the job


def step(world: World, event: ev.Event, now: float) -> tuple[World, tuple[cmd.Command, ...]]:
    """The world after `event`, which the driver received at `now` (seconds, monotonic), and what is to be done."""
    out: Commands = []
    before = world
    world = _pass_time(world, now, out)
    worker = getattr(event, "worker", None)
    if worker is None or worker in world.workers:
        world = _take(world, event, now, out)
    if world.mesh.pairs:
        world = mesh.progress(world, now, out)
    if world.probing:  # after the mesh, which may have left out a host with which a newcomer is probed
        world = networks.progress(world, now, out)
    if world.kept is not None:  # on a host which any of those may have left out
        world = hangs.progress(world, now, out)
    if world.stopping:
        world = stopping.retire(world, now, out)
    if world.trial is not None or world.outdated:
        world = setup.progress(world, now, out)
    if world.script is not None or world.guests:
        world = script.progress(before, world, now, out)
    world = reconfiguration.progress(provisioning.let_in(world, now), now, out)
    if world.early and world.plan is None:
        world = _hear_early(world, now, out)
    world = waits.renew(provisioning.let_in(world, now), now)
    world = stopping.expect_ends(world, now)
    if world.still is not None:
        world = stalls.explain(world)
    return world, tuple(out)


def _hear_later(world: World, event: ev.WorkerSucceeded | ev.ProgramEnded) -> World:
    """Keep a word of the planned world until all members have left the present one."""
    return world if event in world.early else replace(world, early=(*world.early, event))


def _hear_early(world: World, now: float, out: Commands) -> World:
    """What was planned is now, or has come to nothing: words of it that were waiting are heard."""
    early, world = world.early, replace(world, early=())
    for event in early:
        if event.worker in world.workers:  # type: ignore[attr-defined]  # words and ends of programs have one
            world = reconfiguration.progress(_take(world, event, now, out), now, out)
    return world


def deadline(world: World, now: float) -> float:
    """When, `now` at the earliest, to send `Ticked` if nothing else happens; infinity if never."""
    limits = world.limits
    times = (
        world.until,
        world.wake_at,
        world.linger_until or NEVER,
        world.close_by,
        min(world.ends.values(), default=NEVER),
        world.suspect_since + limits.timeouts.grace if world.suspects else NEVER,
        generations.short_until(world),
        waits.deadline(world),
        world.mesh.until,
        world.setup_by,
        min(world.held.values(), default=NEVER),
        min((admission.until for admission in world.probing.values()), default=NEVER) if world.probing else NEVER,
        script_rounds.deadline(world.script) if world.script is not None else NEVER,
    )
    return max(now, min(times))


def _pass_time(world: World, now: float, out: Commands) -> World:
    """What has a deadline of its own, and it has come. Time passes with every event, not only with `Ticked`."""
    limits = world.limits
    if world.linger_until and now >= world.linger_until:
        world = stopping.kill_lingering(world, now, out)
    if now >= min(world.ends.values(), default=NEVER):
        world = stopping.give_up(world, now, out)
    if now >= world.setup_by:
        world = stopping.kill_overdue(world, now, out)
    if world.suspects and now >= world.suspect_since + limits.timeouts.grace:
        world = _break_unexplained(world, now, out)
    world = waits.act(world, now, out)
    if now >= generations.short_until(world):
        world = generations.give_up(world, now, out)
    return provisioning.staff(starting.overdue(world, now, out), now, out) if now >= world.wake_at else world


def _take(world: World, event: ev.Event, now: float, out: Commands) -> World:
    match event:
        case ev.WorkerReady():
            return _ready(world, event, now, out)
        case ev.WorkerFormed() | ev.WorkerOffered() | ev.WorkerRaised() | ev.WorkerSucceeded() | ev.StoreOffered():
            return _take_word(world, event, now, out)
        case ev.WorkerPrepared():
            return reconfiguration.prepared(world, event, now)
        case ev.HostAdded() | ev.HostRemoved() | ev.HostsDiscovered() | ev.Scaled():
            return _take_order(world, event, now, out)
        case ev.AgentReady():
            return networks.agent_ready(world, event, now, out)
        case ev.DoorOpened(address=address):
            return networks.open_door(world, address, now, out)
        case ev.AgentLost(host=name, reason=reason):
            return generations.host_gone(world, name, reason, now, out)
        case ev.Probed():
            return mesh.probed(networks.probed(world, event), event)
        case ev.WorkerStarted(worker=w, pid=pid):
            return put(world, replace(world.workers[w], pid=pid))
        case ev.WorkerExited(worker=w, code=code):
            return generations.gone(
                world, w, f"{w} died ({exit_text(code)})", now, out, blameless=_stuck(world.workers[w], code, now)
            )
        case ev.WorkerFroze(worker=w, state=state):
            out.append(cmd.StopWorker(w, kill=True))
            return generations.gone(world, w, f"{w} froze ({state})", now, out)
        case ev.WorkerSilent():
            return liveness.silent(waits.silent(world, event, now), event, now, out)
        case ev.WorkerHeard(worker=w):
            return liveness.heard(world, w)
        case ev.WorkerStuck():
            return hangs.asks(world, event, now, out)
        case ev.StateKept():
            return hangs.kept(world, event, out)
        case ev.RestartRequested(worker=w, by=by):
            return _restart(world, w, by, now, out)
        case ev.WorkerRegistered(worker=w):
            return setup.registered(world, w, now, out)
        case ev.SetupEnded():
            return setup.ended(world, event, now, out)
        case ev.SetupSubmitted():
            return setup.submit(world, event, now, out)
        case ev.SetupCleared(key=key):
            return setup.clear(world, key, now, out)
        case ev.ProgramEnded():
            return _program_ended(world, event, now, out)
        case ev.DiscoveryFailed(reason=reason):
            return _discovery_failed(world, reason, now, out)
        case ev.JobSubmitted(job=job):
            return jobs.submit(world, job, now, out)
        case ev.JobStopRequested(job=job, reason=reason):
            if world.active is not None and world.active.name == job:
                return jobs.end(world, "stopped", reason, now, out)
            return script.stop(world, job, reason, now, out)
        case ev.StopRequested():
            return stopping.stop(world, event, now, out)
        case ev.WorkerAt():
            return stalls.heard(waits.heard(world, event, now), event, now, out)
        case ev.StoodStill() | ev.WentOn():
            return stalls.heard(world, event, now, out)
        case sev.ScriptSubmitted():
            return script.submit(world, event, now, out)
        case sev.GuestCame():
            return script.came(world, event, now, out)
        case sev.NodeReady():
            return script.ready(world, event, now, out)
        case sev.NodeStarted() | sev.NodeFailed() | sev.NodeSucceeded() | sev.NodeLeft():
            return script.take(world, event, now, out)
        case ev.Ticked():
            return world
        case _:
            raise TypeError(f"{type(event).__name__} is no event that step() knows")


Order = ev.HostAdded | ev.HostRemoved | ev.HostsDiscovered | ev.Scaled


def _take_order(world: World, event: Order, now: float, out: Commands) -> World:
    """People and discovery change which hosts there are and how many workers may run."""
    if world.stopping:
        return world
    before = world
    match event:
        case ev.HostAdded(host=spec, by=by):
            world = replace(world, removed=world.removed - {spec.name})
            world = provisioning.add(world, spec, now, out, by=by or "discovery", by_hand=True)
        case ev.HostRemoved():
            world = _remove(replace(world, removed=world.removed | {event.name}), event, now, out)
            world = script.remove(world, event, out)
        case ev.HostsDiscovered(hosts=specs):
            world = provisioning.discovered(replace(world, discovered=True), specs, now, out)
        case ev.Scaled(min=low, max=high, by=by):
            out.append(cmd.Record("scaled", f"min {low}, max {high if high is not None else 'unlimited'} by {by}"))
            world = replace(world, limits=replace(world.limits, min=low, max=high), since=now)
        case _:
            assert_never(event)
    provisioning.tell_of_room(before, world, out)
    return provisioning.staff(world, now, out)


def _discovery_failed(world: World, reason: str, now: float, out: Commands) -> World:
    """Fatal only if it has never answered and no other host is known; otherwise the hosts stay as they are."""
    if not world.discovered and not world.hosts:
        return stopping.stop(world, ev.StopRequested(f"host discovery failed: {reason}"), now, out)
    out.append(cmd.Record("discovery-failed", reason))
    return world


def _remove(world: World, event: ev.HostRemoved, now: float, out: Commands) -> World:
    """Drain it; or, `now`, take it away as if it had died, but without a strike."""
    name, by = event.name, event.by or "discovery"
    host = world.hosts.get(name)
    if host is None or (host.phase is HostPhase.DRAINING and not event.now):
        return world
    world = provisioning.drain(world, name, "at once" if event.now else "at the next commit", by, out)
    workers = provisioning.on_host(world, name)
    if event.now:
        world = generations.lose(world, workers, f"host {name} was removed at once", now, out, keep=True)
        world = provisioning.stop_workers(world, workers, out, kill=True)
    else:
        world = provisioning.dismiss(world, workers, now, out)
    return provisioning.retire_empty(world, name, out)


def _restart(world: World, w: WorkerId, by: str, now: float, out: Commands) -> World:
    """A person has lost patience with it: it is killed and replaced, without a strike. Not if the job would be lost."""
    if world.stopping or w in world.stopped:
        return world
    if alone_holds_state(world, w):
        text = f"{by}: {w} is not restarted, as it alone holds the training state"
        out.append(cmd.Record("order-refused", text, host=w.host, worker=str(w)))
        return world
    out.append(cmd.StopWorker(w, kill=True))
    return generations.gone(world, w, f"{w} was restarted by {by}", now, out, blameless=True)


def _ready(world: World, event: ev.WorkerReady, now: float, out: Commands) -> World:
    """It waits for a world. Newcomers come at any time; a member is waited for when its epoch is over."""
    w, job, old = event.worker, world.active, world.workers[event.worker]
    if old.state in (WorkerState.STOPPED, WorkerState.FAILED):
        return world
    if job is None or event.job != job.name:  # it began the program when the job was already over
        out.append(cmd.StopProgram(event.job, (w,), "the job is over"))
        return world
    if old.job != job.name or not old.epoch <= event.epoch <= world.numbered:
        return world
    worker = replace(
        old,
        state=WorkerState.READY,
        epoch=event.epoch,
        commit=event.commit,
        clean=event.clean,
        store=event.store,
        has_state=claims(world, old, event),
    )
    world = unheard(replace(world, stuck=less(world.stuck, frozenset({w}))), worker)
    if w not in world.ranked:
        is_first = not world.waiting or world.short_since is not None  # that of them which makes them enough counts
        world = replace(world, since=now if is_first else world.since)
        return put(replace(world, waiting=world.waiting | {w}, starting=less(world.starting, frozenset({w}))), worker)
    left = event.epoch >= world.epoch  # it may have been in a prepared epoch that came to nothing
    last = world.undone.epoch if world.undone is not None and w in world.undone.members else world.epoch
    match world.stage:
        case Stage.GATHERING | Stage.LEAVING if event.epoch >= last:
            return generations.left(replace(world, awaiting=less(world.awaiting, frozenset({w}))), worker, now, out)
        case Stage.LEAVING if left and w in world.awaiting:  # said before it was told that it will not be
            out.append(cmd.AbortWorld(last, (w,), "the prepared epoch was called off"))
        case Stage.GATHERING if w in world.awaiting:  # it never heard of the epoch that broke
            out.append(cmd.AbortWorld(last, (w,), "this epoch is over"))
        case Stage.FORMING if not left and w in world.awaiting and world.order:  # it missed the order
            out.append(replace(world.order, to=(w,)))
        case Stage.FORMING | Stage.RUNNING | Stage.PREPARING | Stage.ASKED if left:  # nobody told it to leave
            return _suspect(world, w, "its program left the elastic loop unasked", now)
    return world


Word = ev.StoreOffered | ev.WorkerFormed | ev.WorkerOffered | ev.WorkerRaised | ev.WorkerSucceeded


def _take_word(world: World, event: Word, now: float, out: Commands) -> World:
    """What members say of the elastic loop; news of a finished epoch is dropped."""
    w, plan = event.worker, world.plan
    if plan is not None and event.epoch == plan.epoch and w in plan.members:  # it is ahead of those who have not left
        if world.stage is not Stage.LEAVING:
            return world
        if isinstance(event, ev.WorkerFormed):
            return replace(world, ahead=world.ahead | {w})
        return _hear_later(world, event) if isinstance(event, ev.WorkerSucceeded) else world
    if not world.active or event.epoch != world.epoch or w not in world.ranked:
        return world
    match event:
        case ev.StoreOffered(store=store):
            return put(world, replace(world.workers[w], store=store))
        case ev.WorkerFormed():
            forming = world.stage is Stage.FORMING and w in world.awaiting
            return generations.formed(world, w, now, out) if forming else world
        case ev.WorkerOffered(commit=commit, ask=ask):
            if world.stage is not Stage.ASKED or w not in world.awaiting or ask != world.asks:
                return world
            return replace(world, awaiting=world.awaiting - {w}, offers=(*world.offers, commit))
        case ev.WorkerRaised(intact=intact, error=error):
            late = now - world.broken_at > ABORTED  # before that the abort may still be on its way
            if world.stage is Stage.GATHERING and w in world.awaiting and late:  # it missed the abort
                out.append(cmd.AbortWorld(world.epoch, (w,), "this epoch is over"))
            if world.stage is Stage.GATHERING or w in world.active.late:
                return world
            if intact:
                return jobs.end(world, "failed", f"{_rank(world, w)} raised {error}", now, out, culprit=w)
            return _suspect(world, w, error, now)
        case ev.WorkerSucceeded():
            return generations.succeeded(world, w, now, out)
        case _:
            assert_never(event)


def _break_unexplained(world: World, now: float, out: Commands) -> World:
    """Connections broke and nobody died. Once that is the network's fault; again and again at one commit, the program's."""
    begun = max((world.workers[w].commit for w in world.members), default=0)
    count, at = world.unexplained
    count = count + 1 if at == begun else 1
    culprit = min(world.suspects)
    if count >= UNEXPLAINED and not world.mesh.pairs:  # while probes are under way it may still be the network
        why = f"{_rank(world, culprit)} raised {world.complaint} ({count} times in a row, and no death explains it)"
        return jobs.end(world, "failed", why, now, out, culprit=culprit)
    why = f"connections of {first(world.suspects)} broke though every worker lives"
    world = mesh.begin(world, now, out)
    return generations.break_epoch(replace(world, unexplained=(count, begun)), why, now, out)


def _suspect(world: World, w: WorkerId, error: str, now: float) -> World:
    """It lost a connection though nobody is known to be dead: the news of a death may be on its way."""
    job = world.active
    if job is None or w in job.succeeded or w in job.late:
        return world
    if world.suspects:
        return replace(world, suspects=world.suspects | {w})
    return replace(world, suspects=frozenset((w,)), suspect_since=now, complaint=error)


def _program_ended(world: World, event: ev.ProgramEnded, now: float, out: Commands) -> World:
    """The program came to its end on `w`: a result, the user's error, or the end of what was told to stop."""
    w, name, error = event.worker, event.job, event.error
    worker, job = world.workers[w], world.active
    if worker.job != name:
        return world
    if any(word.worker == w for word in world.early):  # type: ignore[attr-defined]  # so has this time
        return _hear_later(world, event)
    stopped = worker.state is WorkerState.STOPPED
    state = WorkerState.STOPPED if stopped else WorkerState.READY
    gone = frozenset({w})
    world = put(world, replace(worker, job="", state=state, has_state=False))
    world = replace(world, starting=less(world.starting, gone), waiting=less(world.waiting, gone))
    if job is None or job.name != name:
        return setup.run_next(world, w, now, out)
    if stopped or w in job.late:
        leavers = world.leaving & gone
        world = generations.lose(world, gone, f"{w} did not finish", now, out, keep=True)
        return provisioning.stop_workers(world, leavers, out)
    if not error:
        return _program_returned(world, w, now, out)
    if world.kept is not None and w == world.kept.heir:
        why = f"{w} could not read the training state that {world.kept.by} has kept: {error}"
        return jobs.end(world, "failed", why, now, out, culprit=w)
    if job.formed and w not in world.ranked:
        out.append(cmd.Record("worker-failed", f"newcomer {w} failed: {error}", host=w.host, worker=str(w)))
        return setup.fail_worker(world, w, error)
    return jobs.end(world, "failed", f"{_rank(world, w)} raised {error}", now, out, culprit=w)


def _program_returned(world: World, w: WorkerId, now: float, out: Commands) -> World:
    """A member whose program is over has finished, whatever became of its own word of that."""
    job = world.active
    assert job is not None
    if w in world.ranked:
        idle = world.workers[w]
        world = put(generations.succeeded(world, w, now, out), idle)
    elif job.formed:
        out.append(cmd.Record("worker-idle", f"newcomer {w} ended its program without training", worker=str(w)))
        return world
    job = world.active
    assert job is not None
    return jobs.finish(replace(world, job=replace(job, ended=job.ended | {w})), now, out)


def _stuck(worker: Worker, code: int, now: float) -> bool:
    """Whether it ended itself as an abort could not wake it. A program that exits with that code at once is no such case."""
    return code == ev.STUCK and now - worker.since >= YOUNG


def _rank(world: World, w: WorkerId) -> str:
    return f"rank {world.members.index(w)} ({w})" if w in world.ranked else str(w)
