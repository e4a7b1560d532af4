"""What holds after every step, whatever has happened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbelastic.core import arrivals
from nbelastic.core import commands as cmd
from nbelastic.core.host_admission import external_addresses, wide
from nbelastic.core.persistent import PersistentDict, PersistentSet
from nbelastic.core.reasons import in_words
from nbelastic.core.setup_cells import lacking
from nbelastic.core.state import ClusterState, HostPhase, Stage, WorkerState
from nbelastic.core.step import deadline, step
from nbelastic.driver.decisions import IN_BATCHES
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.addresses import address_of, is_loopback

if TYPE_CHECKING:
    from tests.core.story import Story


def check_more(
    before: ClusterState, event: ev.Event, now: float, cluster: ClusterState, commands: tuple[cmd.Command, ...]
) -> None:
    """If the driver decides on several events at once, the last one leads to the same state and commands as one by one."""
    if not isinstance(event, IN_BATCHES):
        return
    left_out, first = step(before, event, now, more=True)
    if left_out == cluster and first == commands:
        return
    one_by_one, others = step(cluster, ev.Ticked(), now)
    at_once, last = step(left_out, ev.Ticked(), now)
    assert at_once == one_by_one, event
    assert (*first, *last) == (*commands, *others), event


def check(before: ClusterState, cluster: ClusterState, commands: tuple[cmd.Command, ...], now: float) -> None:
    """Asserts what holds after every step."""
    for fault in faults(before, cluster, commands, now):
        raise AssertionError(
            f"{fault}\nreason: {in_words(cluster.reason, now)}\nstage: {cluster.stage}\ncommands: {commands}"
        )


def faults(before: ClusterState, cluster: ClusterState, commands: tuple[cmd.Command, ...], now: float) -> Iterator[str]:
    workers, alive = cluster.workers, set(cluster.workers)
    if not in_words(cluster.reason, now):
        yield "there is no reason"
    for name, default in zip(ClusterState.__struct_fields__[1:], ClusterState.__struct_defaults__, strict=True):
        if isinstance(default, PersistentDict | PersistentSet) and type(getattr(cluster, name)) is not type(default):
            yield f"{name} is a {type(getattr(cluster, name)).__name__}, of which each change copies the whole"
    if any(worker.id != w for w, worker in workers.items()):
        yield "a worker is kept under the name of another"
    if (
        not before.generation <= cluster.generation <= cluster.highest_generation
        or cluster.highest_generation > before.highest_generation + 2
    ):
        yield f"the generation went from {before.generation} to {cluster.generation}, the numbers from {before.highest_generation}"
    planned = cluster.stage in (Stage.PREPARING, Stage.ASKED, Stage.LEAVING)
    if cluster.next_formation is not None and (
        not planned or cluster.next_formation.generation <= cluster.generation or cluster.active is None
    ):
        yield f"generation {cluster.next_formation.generation} is prepared in {cluster.stage}"
    if cluster.entered_next and (
        cluster.next_formation is None or not cluster.entered_next <= frozenset(cluster.next_formation.members)
    ):
        yield f"{cluster.entered_next} are ahead in a generation that is not prepared"
    if frozenset(cluster.members) != cluster.member_set or len(cluster.members) != len(cluster.member_set):
        yield "ranks are not unique, or `member_set` is not `members`"
    epoch_sets = (cluster.member_set, cluster.newcomers, cluster.leaving, cluster.awaiting, cluster.suspects)
    if cluster.active is None and any(epoch_sets):
        yield "there are members without a job"
    if cluster.active is None and cluster.cancelled_formation is not None:
        yield "a plan that was called off is kept without a job"
    if cluster.active is None and cluster.unexplained_breaks[0]:
        yield "unexplained breaks are counted without a job"
    if cluster.unregistered != {w for w in cluster.starting if not cluster.workers[w].registered}:
        yield f"unregistered are {sorted(cluster.unregistered)}, starting {sorted(cluster.starting)}"
    for name in ("member_set", "awaiting", "newcomers", "starting", "leaving", "stopped", "failed", "suspects"):
        if not getattr(cluster, name) <= alive:
            yield f"{name} holds {getattr(cluster, name) - alive}, which are lost"
    for name in ("awaiting", "leaving", "suspects"):
        members = cluster.member_set
        if name == "awaiting" and cluster.stage is Stage.PREPARING and cluster.next_formation is not None:
            members = frozenset(cluster.next_formation.members)
        if not getattr(cluster, name) <= members:
            yield f"{name} holds {getattr(cluster, name) - members}, which are not members"
    for name in ("member_set", "newcomers", "starting", "failed"):
        if getattr(cluster, name) & cluster.stopped:
            yield f"{name} holds {getattr(cluster, name) & cluster.stopped}, which were asked to end"
    if not cluster.held_back.keys() <= cluster.newcomers | cluster.starting or any(
        until <= now for until in cluster.held_back.values()
    ):
        yield "newcomers are left out that do not wait, or for longer than they were to be"
    if any(not workers[w].reason or not workers[w].failures for w in cluster.held_back):
        yield "a newcomer is left out without a reason"
    if cluster.newcomers & cluster.member_set or cluster.newcomers & cluster.starting:
        yield "a worker waits as a newcomer and is something else too"
    if {w for w, worker in workers.items() if worker.state is WorkerState.STOPPED} != cluster.stopped:
        yield "`stopped` is not who is stopped"
    if {w for w, worker in workers.items() if worker.state is WorkerState.FAILED} != cluster.failed:
        yield "`failed` is not who has failed"
    yield from _faults_of_setup(cluster)
    draining = {name for name, host in cluster.hosts.items() if host.phase is HostPhase.DRAINING}
    if not {name for name, ending in cluster.ending.items() if not ending.successor} <= draining:
        yield f"{cluster.ending.keys() - draining} are announced to end, and do not drain"
    if any(now > ending.at for ending in cluster.ending.values()):
        yield "a host is kept beyond its end"
    for host in cluster.hosts.values():
        busy = {WorkerId(host.spec.name, i, slot.incarnation) for i, slot in enumerate(host.slots) if slot.busy}
        if busy != {w for w in alive if w.host == host.spec.name}:
            yield f"{host.spec.name}'s busy slots are not its living workers"
        if host.full != all(slot.busy for slot in host.slots[: host.spec.slots]):
            yield f"{host.spec.name} is full or not, and does not know it"
        if host.phase is HostPhase.LOST and busy:
            yield f"{host.spec.name} is lost and has workers"
    if not {w.host for w in alive} <= cluster.hosts.keys():
        yield "a worker lives on no host"
    yield from _faults_of_waiting(cluster, now)
    wanted = cluster.limits.wanted + (cluster.kept_state is not None)  # a worker more may read the state that was kept
    if (
        len(alive) - len(cluster.stopped) - len(cluster.leaving) > wanted
        and not cluster.failed
        and not cluster.stopping
    ):
        yield f"{len(alive)} workers live, {wanted} are wanted"
    yield from _faults_of_networks(cluster, now)
    yield from _faults_of_standing_still(cluster)
    yield from _faults_of_halts(cluster)
    for command in commands:
        yield from _faults_of(command, before, cluster, now)
    if cluster.stage is Stage.FORMING and (cluster.formation is None or cluster.formation.members[0].host == ""):
        yield "a world forms without an order"


def _faults_of_waiting(cluster: ClusterState, now: float) -> Iterator[str]:
    """Each wait for a message has a deadline, unless too few workers are ready and the user allows it."""
    wait, job = cluster.wait, cluster.active
    if cluster.wake_at > min((arrivals.worker_deadline(cluster, w) for w in cluster.starting), default=NEVER):
        yield f"no deadline for the start of {sorted(cluster.starting)}"
    if wait is not None and (wait.stage, wait.generation, wait.awaited) != (
        cluster.stage,
        cluster.generation,
        len(cluster.awaiting),
    ):
        yield f"it waits in {wait.stage} of generation {wait.generation} for {wait.awaited}"
    if not cluster.stopping and cluster.end_deadlines.keys() != cluster.stopped:
        yield f"{cluster.stopped ^ cluster.end_deadlines.keys()} are asked to end, without a deadline"
    endless = cluster.limits.elastic_timeout is None
    told = job.asked_to_stop | job.succeeded if job is not None else frozenset()  # their programs are about to end
    waits = job is not None and bool(cluster.awaiting - told) and cluster.stage is not Stage.RUNNING
    trains = cluster.stage is Stage.HALTED and len(cluster.awaiting) == len(cluster.members)  # to the halt
    if waits and not trains and deadline(cluster, now) == NEVER and not endless:
        yield f"{cluster.stage} waits for {cluster.awaiting} without end"
    busy = cluster.timeout_paused_since is not None and not (
        cluster.members or cluster.newcomers
    )  # in what comes before the loop
    if (
        job is not None
        and cluster.stage is Stage.GATHERING
        and deadline(cluster, now) == NEVER
        and not (endless or busy)
    ):
        yield "there is no world, and no deadline"


def _faults_of_setup(cluster: ClusterState) -> Iterator[str]:
    for w, worker in cluster.workers.items():
        idle = worker.state is WorkerState.READY and not worker.job
        if idle and (lacking(cluster, worker) is not None or not worker.registered):
            yield f"{w} is ready and not set up"
        if worker.failed_cell and worker.state not in (WorkerState.FAILED, WorkerState.STOPPED):
            yield f"a setup cell failed on {w}, and it is {worker.state}"
        if worker.running_cell and worker.state is WorkerState.STARTING and cluster.setup_by == float("inf"):
            yield f"{w} runs a setup cell without a deadline"
    if cluster.trial is not None and not cluster.trial.running:
        yield "no worker runs the cell that is on trial"
    if len({cell.key for cell in cluster.setup}) != len(cluster.setup):
        yield "two setup cells have the same key"


def _faults_of_networks(cluster: ClusterState, now: float) -> Iterator[str]:
    is_wide = wide(cluster)
    for name, host in cluster.hosts.items():
        there = host.phase in (HostPhase.UP, HostPhase.DRAINING) and not cluster.stopping
        if there and host.addresses and host.address not in [i.address for i in host.addresses]:
            yield f"{name} is used at {host.address!r}, which is none of its addresses"
        if there and is_wide and is_loopback(host.address) and external_addresses(host):
            yield f"{name} is on {host.address} though others are on other machines"
        if there and host.agreed_addresses and host.address not in host.agreed_addresses:
            yield f"{name} is at {host.address}, where not all have reached it"
    for name, admission in cluster.probing.items():
        host = cluster.hosts.get(name)
        if host is None or host.phase is not HostPhase.STARTING or "probed with" not in host.reason:
            yield f"{name} is probed, but does not wait for that"
        if now >= admission.until or not admission.awaited:
            yield f"{name} waits for probes that are over"
        if not all(partner in cluster.hosts for partner in admission.partners):
            yield f"{name} is probed with hosts that have gone: {admission.partners}"


def _faults_of_standing_still(cluster: ClusterState) -> Iterator[str]:
    still = cluster.stall
    if still is not None and (
        still.generation != cluster.generation or still.text not in in_words(cluster.reason, 0.0)
    ):
        yield "a world stands still and does not say so, or another one does"
    explained = set(still.stragglers if still is not None else ()) | cluster.held_back.keys()
    told = {w for w, worker in cluster.workers.items() if worker.reason} - cluster.failed - cluster.stopped
    if told - explained:
        yield f"{told - explained} are said to be behind, and are not"


def _faults_of_halts(cluster: ClusterState) -> Iterator[str]:
    halt = cluster.halt
    if halt.running and not (cluster.stands_still and halt.cells and halt.until < NEVER):
        yield f"a cell runs in {cluster.stage}, or without a deadline"
    if not halt.running and (halt.until < NEVER or halt.ended):
        yield "the deadline or the results of a cell are kept after its end"
    if not halt.running <= cluster.member_set:
        yield f"a cell runs on {halt.running - cluster.member_set}, which are not members"
    if halt.asked and cluster.stage is not Stage.ASKED:
        yield f"a halt was asked for in {cluster.stage}"
    if cluster.stands_still and not (halt.running or halt.paused_by):
        yield "the members stand still for nothing"
    if cluster.active is None and (halt.cells or halt.paused_by):
        yield "there are cells or a pause without a job"


WORDS = (  # messages of agents and workers, and requests about jobs
    ev.AgentReady,
    ev.Probed,
    ev.PositionReported,
    ev.WorkerStarted,
    ev.WorkerRegistered,
    ev.SetupEnded,
    ev.WorkerExited,
    ev.WorkerFrozen,
    ev.WorkerSilent,
    ev.WorkerResponded,
    ev.WorkerReady,
    ev.WorkerRaised,
    ev.StoreOffered,
    ev.WorkerPrepared,
    ev.LeaveAcknowledged,
    ev.WorkerHalted,
    ev.CommitCellEnded,
    ev.PauseRequested,
    ev.ResumeRequested,
    ev.WorkerFormed,
    ev.WorkerSucceeded,
    ev.WorkerHung,
    ev.StateKept,
    ev.ProgramEnded,
    ev.JobSubmitted,
    ev.JobStopRequested,
)


def check_doubled(cluster: ClusterState, event: ev.Event, now: float) -> None:
    """A message that arrives twice in a row has no effect the second time.

    By design, repeated questions are answered again: of a worker that waits for a world, whose connections broke, or that
    hangs, and of a job that was refused.
    """
    if not isinstance(event, WORDS):
        return
    again, commands = step(cluster, event, now)
    again = replace(again, reason=cluster.reason)
    changed = {
        name: getattr(again, name)
        for name in cluster.__struct_fields__
        if getattr(again, name) != getattr(cluster, name)
    }
    assert not changed, f"{event} changes {changed} when it arrives twice"
    match event:
        case ev.WorkerReady(worker=w) | ev.WorkerRaised(worker=w):
            answers = (cmd.FormWorld, cmd.AbortWorld, cmd.StopProgram, cmd.LoadKeptState)
            commands = [c for c in commands if not isinstance(c, answers) or _receivers(c) != (w,)]
        case ev.WorkerHung() | ev.StateKept():
            commands = [c for c in commands if not isinstance(c, cmd.EndHungWorker | cmd.DeleteKeptState)]
        case ev.JobSubmitted(job=job):
            commands = [c for c in commands if not isinstance(c, cmd.EndJob) or c.job != job]
    assert not commands, f"{event} is answered twice: {commands}"


def _receivers(command: cmd.FormWorld | cmd.AbortWorld | cmd.StopProgram | cmd.LoadKeptState) -> tuple[WorkerId, ...]:
    match command:
        case cmd.LoadKeptState(worker=w):
            return (w,)
        case cmd.FormWorld(to=workers) | cmd.AbortWorld(members=workers) | cmd.StopProgram(workers=workers):
            return workers


def check_stores(story: Story, event: ev.Event, commands: tuple[cmd.Command, ...]) -> None:
    """Asserts that no world forms with a store at an old address while another worker has offered a new one."""
    for w in story.cluster.workers.keys() & {getattr(event, "worker", None)}:
        if isinstance(event, ev.WorkerReady | ev.StoreOffered):
            story.stores[w] = event.store
    for order in commands:
        host = story.cluster.hosts[order.members[0].host] if isinstance(order, cmd.FormWorld) else None
        if host is None or order.to or not host.moved_at or address_of(order.store) == host.address:
            continue
        if order.generation in story.prepared:
            continue
        assert story.now >= host.moved_at + story.cluster.limits.timeouts.store, (
            f"{order.store} was left for {host.address}"
        )
        hosts = {w: story.cluster.hosts[w.host] for w in order.members}
        fresh = [w for w, h in hosts.items() if not h.moved_at or address_of(story.stores[w]) == h.address]
        assert not fresh, f"{order.store} was left for {host.address}; {fresh} have offered others"
    story.prepared |= {order.formation.generation for order in commands if isinstance(order, cmd.PrepareWorld)}


def _faults_of(command: cmd.Command, before: ClusterState, cluster: ClusterState, now: float) -> Iterator[str]:
    match command:
        case cmd.FormWorld(generation=generation, members=members, root=root, receivers=receivers, to=to):
            if command != cluster.next_formation and (
                generation != cluster.generation or (not to and generation == before.generation)
            ):
                yield "a world is formed in a generation that is not the next"
            if generation > cluster.highest_generation or (not to and generation <= before.generation):
                yield "a generation has a number that is not its own"
            most = cluster.limits.most + (cluster.limits.most == 1 and members[0] in before.leaving)
            if not cluster.limits.min <= len(members) <= most and not to:
                yield f"a world of {len(members)}, outside [{cluster.limits.min}, {cluster.limits.max}]"
            if (command != cluster.next_formation and members != cluster.members) or not set(members) <= set(
                cluster.workers
            ):
                yield "the order names others than the members"
            phases = {cluster.hosts[w.host].phase for w in members}
            if not phases <= {HostPhase.UP, HostPhase.DRAINING}:
                yield f"a member is on a host that was not admitted: {phases}"
            hosts = [w.host for w in members]
            if sum(a != b for a, b in pairwise(hosts)) != len(set(hosts)) - 1:
                yield f"ranks are not packed by host: {hosts}"
            survivors = list(dict.fromkeys(w.host for w in before.members if w in members))
            newcomers = sorted(set(hosts) - set(survivors), key=lambda name: cluster.hosts[name].joined)
            by_seniority = list(dict.fromkeys(hosts)) == [*survivors, *newcomers]
            free = to or not before.hosts or any(cluster.hosts[w.host].moved_at for w in members)  # a store may decide
            free = free or members[0] in before.leaving  # the only one with the training state stays, as rank 0
            if not (free or by_seniority):
                yield f"the ranks go by {hosts}, not survivors {survivors} first, then newcomers {newcomers} by seniority"
            if root in receivers or not set(receivers) <= set(range(len(members))):
                yield "the root receives, or no rank does"
            if command == cluster.next_formation:
                return  # the members have not left yet: the fakes check later whether they are equal
            claims = [
                (cluster.workers[w].has_state, cluster.workers[w].clean, cluster.workers[w].commit) for w in members
            ]
            if not to and claims[root] != max(claims):
                yield f"rank {root} has not the newest state: {claims}"
            if not to and before.active is not None and before.active.formed and not claims[root][0]:
                yield f"a job goes on from rank {root}, which does not hold its state: {claims}"
            if not to and any(c != claims[root] and r not in receivers for r, c in enumerate(claims)):
                yield f"a rank with an old state receives none: {claims}, {receivers}"
        case cmd.PrepareWorld(formation=order):
            host = cluster.hosts[order.members[0].host]
            if host.moved_at and address_of(order.store) != host.address:
                yield f"a generation is prepared at {order.store}, but its host is at {host.address} now"
        case cmd.StartWorker(worker=w):
            host = before.hosts.get(w.host) or cluster.hosts[w.host]
            keeps = cluster.kept_state is not None and w.host == cluster.kept_state.by.host  # a host that drains too
            up = cluster.hosts[w.host].phase is HostPhase.UP
            if w in before.workers or not (up or (keeps and cluster.hosts[w.host].phase is HostPhase.DRAINING)):
                yield f"{w} is started where it cannot be"
            if w.slot >= cluster.hosts[w.host].spec.slots:
                yield f"{w} is started above its host's slots"
            if w.slot < len(host.slots) and host.slots[w.slot].backoff_until > now:
                cleared = cluster.hosts[w.host].slots[w.slot].failures == 0
                if not cleared:
                    yield f"{w} is started while its slot is in back-off"
        case cmd.AskLeave(members=members) | cmd.LeaveAt(members=members):
            if members != cluster.members:
                yield "others than the members are asked to leave"
        case cmd.StopProgram(workers=workers) | cmd.AbortWorld(members=workers):
            if not workers:
                yield "a command for nobody"
