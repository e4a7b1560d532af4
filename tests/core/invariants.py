"""What must hold after every step, whatever has happened: see "Driver" in the scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import provisioning
from nbelastic.core.addresses import STORE_PATIENCE, outward
from nbelastic.core.membership import deadline, step
from nbelastic.core.networks import wide
from nbelastic.core.reasons import in_words
from nbelastic.core.setup import lacking
from nbelastic.core.state import HostPhase, Stage, WorkerState, World
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.limits import NEVER
from nbelastic.system.addresses import address_of, is_loopback

if TYPE_CHECKING:
    from tests.core.story import Story


def check(before: World, world: World, commands: tuple[cmd.Command, ...], now: float) -> None:
    """What must hold after every step, whatever happened."""
    for fault in faults(before, world, commands, now):
        raise AssertionError(
            f"{fault}\nreason: {in_words(world.reason, now)}\nstage: {world.stage}\ncommands: {commands}"
        )


def faults(before: World, world: World, commands: tuple[cmd.Command, ...], now: float) -> Iterator[str]:
    workers, alive = world.workers, set(world.workers)
    if not in_words(world.reason, now):
        yield "there is no reason"
    if any(worker.id != w for w, worker in workers.items()):
        yield "a worker is kept under the name of another"
    if not before.epoch <= world.epoch <= world.numbered or world.numbered > before.numbered + 2:
        yield f"the epoch went from {before.epoch} to {world.epoch}, the numbers from {before.numbered}"
    planned = world.stage in (Stage.PREPARING, Stage.ASKED, Stage.LEAVING)
    if world.plan is not None and (not planned or world.plan.epoch <= world.epoch or world.active is None):
        yield f"epoch {world.plan.epoch} is prepared in {world.stage}"
    if world.ahead and (world.plan is None or not world.ahead <= frozenset(world.plan.members)):
        yield f"{world.ahead} are ahead in an epoch that is not prepared"
    if frozenset(world.members) != world.ranked or len(world.members) != len(world.ranked):
        yield "ranks are not unique, or `ranked` is not `members`"
    epoch_sets = (world.ranked, world.waiting, world.leaving, world.awaiting, world.suspects)
    if world.active is None and any(epoch_sets):
        yield "there are members without a job"
    if world.active is None and world.undone is not None:
        yield "a plan that was called off is kept without a job"
    if world.active is None and world.unexplained[0]:
        yield "unexplained breaks are counted without a job"
    for name in ("ranked", "awaiting", "waiting", "starting", "leaving", "stopped", "failed", "suspects"):
        if not getattr(world, name) <= alive:
            yield f"{name} holds {getattr(world, name) - alive}, who are gone"
    for name in ("awaiting", "leaving", "suspects"):
        members = world.ranked
        if name == "awaiting" and world.stage is Stage.PREPARING and world.plan is not None:
            members = frozenset(world.plan.members)
        if not getattr(world, name) <= members:
            yield f"{name} holds {getattr(world, name) - members}, who are no members"
    for name in ("ranked", "waiting", "starting", "failed"):
        if getattr(world, name) & world.stopped:
            yield f"{name} holds {getattr(world, name) & world.stopped}, who were told to end"
    if not world.held.keys() <= world.waiting | world.starting or any(until <= now for until in world.held.values()):
        yield "newcomers are left out that do not wait, or for longer than they were to be"
    if any(not workers[w].reason or not workers[w].failures for w in world.held):
        yield "a newcomer is left out without a reason"
    if world.waiting & world.ranked or world.waiting & world.starting:
        yield "a worker waits as a newcomer and is something else too"
    if {w for w, worker in workers.items() if worker.state is WorkerState.STOPPED} != world.stopped:
        yield "`stopped` is not who is stopped"
    if {w for w, worker in workers.items() if worker.state is WorkerState.FAILED} != world.failed:
        yield "`failed` is not who has failed"
    yield from _faults_of_setup(world)
    for host in world.hosts.values():
        busy = {WorkerId(host.spec.name, i, slot.incarnation) for i, slot in enumerate(host.slots) if slot.busy}
        if busy != {w for w in alive if w.host == host.spec.name}:
            yield f"{host.spec.name}'s busy slots are not its living workers"
        if host.full != all(slot.busy for slot in host.slots[: host.spec.slots]):
            yield f"{host.spec.name} is full or not, and does not know it"
        if host.phase is HostPhase.LOST and busy:
            yield f"{host.spec.name} is lost and has workers"
    if not {w.host for w in alive} <= world.hosts.keys():
        yield "a worker lives on no host"
    yield from _faults_of_waiting(world, now)
    wanted = world.limits.wanted + (world.kept is not None)  # a worker more may read the state that was kept
    if len(alive) - len(world.stopped) - len(world.leaving) > wanted and not world.failed and not world.stopping:
        yield f"{len(alive)} workers live, {wanted} are wanted"
    yield from _faults_of_networks(world, now)
    yield from _faults_of_standing_still(world)
    for command in commands:
        yield from _faults_of(command, before, world, now)
    if world.stage is Stage.FORMING and (world.order is None or world.order.members[0].host == ""):
        yield "a world forms without an order"


def _faults_of_waiting(world: World, now: float) -> Iterator[str]:
    """No stage waits for somebody's word without an end, but where there are too few and the user wants it so."""
    wait, job = world.wait, world.active
    if world.wake_at > min((provisioning.comes_by(world, w) for w in world.starting), default=NEVER):
        yield f"nobody looks whether {sorted(world.starting)} come"
    if wait is not None and (wait.stage, wait.epoch, wait.left) != (world.stage, world.epoch, len(world.awaiting)):
        yield f"it waits in {wait.stage} of epoch {wait.epoch} for {wait.left}"
    if not world.stopping and world.ends.keys() != world.stopped:
        yield f"{world.stopped ^ world.ends.keys()} are to end, and nobody looks whether they do"
    endless = world.limits.elastic_timeout is None
    told = job.late | job.succeeded if job is not None else frozenset()  # their programs are about to end
    waits = job is not None and bool(world.awaiting - told) and world.stage is not Stage.RUNNING
    if waits and deadline(world, now) == NEVER and not endless:
        yield f"{world.stage} waits for {world.awaiting} without end"
    busy = world.paused_since is not None and not (world.members or world.waiting)  # in what comes before the loop
    if job is not None and world.stage is Stage.GATHERING and deadline(world, now) == NEVER and not (endless or busy):
        yield "there is no world, and nobody does anything about that"


def _faults_of_setup(world: World) -> Iterator[str]:
    for w, worker in world.workers.items():
        idle = worker.state is WorkerState.READY and not worker.job
        if idle and (lacking(world, worker) is not None or not worker.registered):
            yield f"{w} is ready and not set up"
        if worker.failed_cell and worker.state not in (WorkerState.FAILED, WorkerState.STOPPED):
            yield f"a setup cell failed on {w}, and it is {worker.state}"
        if worker.cell and worker.state is WorkerState.STARTING and world.setup_by == float("inf"):
            yield f"{w} runs a setup cell without a deadline"
    if world.trial is not None and not world.trial.running:
        yield "nobody tries a cell that is on trial"
    if len({cell.key for cell in world.setup}) != len(world.setup):
        yield "two setup cells have the same key"


def _faults_of_networks(world: World, now: float) -> Iterator[str]:
    is_wide = wide(world)
    for name, host in world.hosts.items():
        there = host.phase in (HostPhase.UP, HostPhase.DRAINING) and not world.stopping
        if there and host.addresses and host.address not in [i.address for i in host.addresses]:
            yield f"{name} is used at {host.address!r}, which is none of its addresses"
        if there and is_wide and is_loopback(host.address) and outward(host):
            yield f"{name} is on {host.address} though others are on other machines"
        if there and host.agreed and host.address not in host.agreed:
            yield f"{name} is at {host.address}, where not all have reached it"
    for name, admission in world.probing.items():
        host = world.hosts.get(name)
        if host is None or host.phase is not HostPhase.STARTING or "probed with" not in host.reason:
            yield f"{name} is probed, but does not wait for that"
        if now >= admission.until or not admission.awaited:
            yield f"{name} waits for probes that are over"
        if not all(partner in world.hosts for partner in admission.partners):
            yield f"{name} is probed with hosts that have gone: {admission.partners}"


def _faults_of_standing_still(world: World) -> Iterator[str]:
    still = world.still
    if still is not None and (still.epoch != world.epoch or still.text not in in_words(world.reason, 0.0)):
        yield "a world stands still and does not say so, or another one does"
    explained = set(still.behind if still is not None else ()) | world.held.keys()
    told = {w for w, worker in world.workers.items() if worker.reason} - world.failed - world.stopped
    if told - explained:
        yield f"{told - explained} are said to be behind, and are not"


WORDS = (  # what agents and workers say, and notebooks about jobs
    ev.AgentReady,
    ev.Probed,
    ev.WorkerAt,
    ev.WorkerStarted,
    ev.WorkerRegistered,
    ev.SetupEnded,
    ev.WorkerExited,
    ev.WorkerFroze,
    ev.WorkerSilent,
    ev.WorkerHeard,
    ev.WorkerReady,
    ev.WorkerRaised,
    ev.StoreOffered,
    ev.WorkerPrepared,
    ev.WorkerOffered,
    ev.WorkerFormed,
    ev.WorkerSucceeded,
    ev.WorkerStuck,
    ev.StateKept,
    ev.ProgramEnded,
    ev.JobSubmitted,
    ev.JobStopRequested,
)


def check_doubled(world: World, event: ev.Event, now: float) -> None:
    """A word that is heard twice in a row changes nothing the second time, and commands nothing.

    By design, whoever asks twice is answered twice: a worker that waits for a world, one whose connections broke, one that is
    stuck, and a job that was refused.
    """
    if not isinstance(event, WORDS):
        return
    again, commands = step(world, event, now)
    again = replace(again, reason=world.reason)
    changed = {
        name: getattr(again, name) for name in world.__struct_fields__ if getattr(again, name) != getattr(world, name)
    }
    assert not changed, f"{event} changes {changed} when it is heard twice"
    match event:
        case ev.WorkerReady(worker=w) | ev.WorkerRaised(worker=w):
            answers = (cmd.FormWorld, cmd.AbortWorld, cmd.StopProgram, cmd.TakeKept)
            commands = [c for c in commands if not isinstance(c, answers) or _receivers(c) != (w,)]
        case ev.WorkerStuck() | ev.StateKept():
            commands = [c for c in commands if not isinstance(c, cmd.EndStuck | cmd.ForgetKept)]
        case ev.JobSubmitted(job=job):
            commands = [c for c in commands if not isinstance(c, cmd.EndJob) or c.job != job]
    assert not commands, f"{event} is answered twice: {commands}"


def _receivers(command: cmd.FormWorld | cmd.AbortWorld | cmd.StopProgram | cmd.TakeKept) -> tuple[WorkerId, ...]:
    match command:
        case cmd.TakeKept(worker=w):
            return (w,)
        case cmd.FormWorld(to=workers) | cmd.AbortWorld(members=workers) | cmd.StopProgram(workers=workers):
            return workers


def check_stores(story: Story, event: ev.Event, commands: tuple[cmd.Command, ...]) -> None:
    """No world is formed with a store that its host has left behind while somebody has offered a new one."""
    for w in story.world.workers.keys() & {getattr(event, "worker", None)}:
        if isinstance(event, ev.WorkerReady | ev.StoreOffered):
            story.stores[w] = event.store
    for order in commands:
        host = story.world.hosts[order.members[0].host] if isinstance(order, cmd.FormWorld) else None
        if host is None or order.to or not host.moved_at or address_of(order.store) == host.address:
            continue
        if order.epoch in story.prepared:
            continue
        assert story.now >= host.moved_at + STORE_PATIENCE, f"{order.store} was left for {host.address}"
        hosts = {w: story.world.hosts[w.host] for w in order.members}
        fresh = [w for w, h in hosts.items() if not h.moved_at or address_of(story.stores[w]) == h.address]
        assert not fresh, f"{order.store} was left for {host.address}; {fresh} have offered others"
    story.prepared |= {order.order.epoch for order in commands if isinstance(order, cmd.PrepareWorld)}


def _faults_of(command: cmd.Command, before: World, world: World, now: float) -> Iterator[str]:
    match command:
        case cmd.FormWorld(epoch=epoch, members=members, root=root, receivers=receivers, to=to):
            if command != world.plan and (epoch != world.epoch or (not to and epoch == before.epoch)):
                yield "a world is formed in an epoch that is not the next"
            if epoch > world.numbered or (not to and epoch <= before.epoch):
                yield "an epoch has a number that is not its own"
            if not world.limits.min <= len(members) <= world.limits.most and not to:
                yield f"a world of {len(members)}, outside [{world.limits.min}, {world.limits.max}]"
            if (command != world.plan and members != world.members) or not set(members) <= set(world.workers):
                yield "the order names others than the members"
            phases = {world.hosts[w.host].phase for w in members}
            if not phases <= {HostPhase.UP, HostPhase.DRAINING}:
                yield f"a member is on a host that was not admitted: {phases}"
            hosts = [w.host for w in members]
            if sum(a != b for a, b in pairwise(hosts)) != len(set(hosts)) - 1:
                yield f"ranks are not packed by host: {hosts}"
            survivors = list(dict.fromkeys(w.host for w in before.members if w in members))
            newcomers = sorted(set(hosts) - set(survivors), key=lambda name: world.hosts[name].joined)
            by_seniority = list(dict.fromkeys(hosts)) == [*survivors, *newcomers]
            free = to or not before.hosts or any(world.hosts[w.host].moved_at for w in members)  # a store may decide
            if not (free or by_seniority):
                yield f"the ranks go by {hosts}, not survivors {survivors} first, then newcomers {newcomers} by seniority"
            if root in receivers or not set(receivers) <= set(range(len(members))):
                yield "the root receives, or nobody does"
            if command == world.plan:
                return  # the members have not left yet: the fakes know whether they are equal when they have
            claims = [(world.workers[w].has_state, world.workers[w].clean, world.workers[w].commit) for w in members]
            if not to and claims[root] != max(claims):
                yield f"rank {root} has not the newest state: {claims}"
            if not to and before.active is not None and before.active.formed and not claims[root][0]:
                yield f"a job goes on from rank {root}, which does not hold its state: {claims}"
            if not to and any(c != claims[root] and r not in receivers for r, c in enumerate(claims)):
                yield f"somebody with an old state receives none: {claims}, {receivers}"
        case cmd.PrepareWorld(order=order):
            host = world.hosts[order.members[0].host]
            if host.moved_at and address_of(order.store) != host.address:
                yield f"an epoch is prepared at {order.store}, but its host is at {host.address} now"
        case cmd.StartWorker(worker=w):
            host = before.hosts.get(w.host) or world.hosts[w.host]
            keeps = world.kept is not None and w.host == world.kept.by.host  # a host that drains too
            up = world.hosts[w.host].phase is HostPhase.UP
            if w in before.workers or not (up or (keeps and world.hosts[w.host].phase is HostPhase.DRAINING)):
                yield f"{w} is started where it cannot be"
            if w.slot >= world.hosts[w.host].spec.slots:
                yield f"{w} is started above its host's slots"
            if w.slot < len(host.slots) and host.slots[w.slot].cooling_until > now:
                pardoned = world.hosts[w.host].slots[w.slot].strikes == 0
                if not pardoned:
                    yield f"{w} is started while its slot cools"
        case cmd.AskLeave(members=members) | cmd.LeaveAt(members=members):
            if members != world.members:
                yield "others than the members are asked to leave"
        case cmd.StopProgram(workers=workers) | cmd.AbortWorld(members=workers):
            if not workers:
                yield "a command for nobody"
