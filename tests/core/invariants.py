"""What holds after every step, whatever has happened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nbelastic.core import arrivals
from nbelastic.core import commands as cmd
from nbelastic.core.cluster_snapshot import Saved, is_saved, snapshot_of
from nbelastic.core.host_admission import external_addresses, wide
from nbelastic.core.persistent import PersistentDict, PersistentSet
from nbelastic.core.reasons import in_words
from nbelastic.core.setup_cells import lacking
from nbelastic.core.state import ClusterState, HostPhase, Stage, WorkerState
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.addresses import address_of, is_loopback
from tests.core.unchanged import alive, found_in, plain, reads

if TYPE_CHECKING:
    from tests.core.story import Story

PERSISTENT = [
    (name, type(default))
    for name, default in zip(ClusterState.__struct_fields__[1:], ClusterState.__struct_defaults__, strict=True)
    if isinstance(default, PersistentDict | PersistentSet)
]
WORKER_SETS = ("member_set", "newcomers", "starting", "leaving", "stopped", "failed", "suspects")


def check(before: ClusterState, cluster: ClusterState, commands: tuple[cmd.Command, ...], now: float) -> None:
    """Asserts what holds after every step."""
    for fault in faults(before, cluster, commands, now):
        raise AssertionError(
            f"{fault}\nreason: {in_words(cluster.reason, now)}\nstage: {cluster.stage}\ncommands: {commands}"
        )


def check_saved(cluster: ClusterState, earlier: Saved | None) -> Saved:
    """Parts that have not changed since the earlier save are used again: the whole is as if it were made anew."""
    saved = snapshot_of(cluster, earlier)
    assert saved == snapshot_of(cluster)
    if earlier is not None and is_saved(earlier[0], cluster):
        assert replace(saved, ran=()) == replace(earlier[1], ran=())
    return cluster, saved


def faults(before: ClusterState, cluster: ClusterState, commands: tuple[cmd.Command, ...], now: float) -> Iterator[str]:
    for name, kind in PERSISTENT:
        if type(getattr(cluster, name)) is not kind:
            yield f"{name} is a {type(getattr(cluster, name)).__name__}, of which each change copies the whole"
    if (
        not before.generation <= cluster.generation <= cluster.highest_generation
        or cluster.highest_generation > before.highest_generation + 2
    ):
        yield f"the generation went from {before.generation} to {cluster.generation}, the numbers from {before.highest_generation}"
    yield from found_in(cluster, LOOKS)
    yield from _faults_of_surplus(cluster)
    yield from _faults_of_endless_waits(cluster, now)
    yield from _faults_of_ends(cluster, now)
    yield from _faults_of_probes(cluster, now)
    yield from _faults_of_newcomers(cluster, now)
    for command in commands:
        yield from _faults_of(command, before, cluster, now)


@reads(
    "stage formation generation next_formation members member_set entered_next job newcomers leaving "
    "suspects cancelled_formation unexplained_breaks"
)
def _faults_of_generations(cluster: ClusterState) -> Iterator[str]:
    if cluster.stage is Stage.FORMING and (cluster.formation is None or cluster.formation.members[0].host == ""):
        yield "a world forms without an order"
    following, members = cluster.next_formation, plain(cluster, "member_set")
    planned = cluster.stage in (Stage.PREPARING, Stage.ASKED, Stage.LEAVING)
    if following is not None and (not planned or following.generation <= cluster.generation or cluster.active is None):
        yield f"generation {following.generation} is prepared in {cluster.stage}"
    if cluster.entered_next and (following is None or not frozenset(cluster.entered_next) <= set(following.members)):
        yield f"{cluster.entered_next} are ahead in a generation that is not prepared"
    if frozenset(cluster.members) != members or len(cluster.members) != len(members):
        yield "ranks are not unique, or `member_set` is not `members`"
    if cluster.active is None:
        if any(getattr(cluster, name) for name in ("member_set", "newcomers", "leaving", "suspects")):
            yield "there are members without a job"
        if cluster.cancelled_formation is not None:
            yield "a plan that was called off is kept without a job"
        if cluster.unexplained_breaks[0]:
            yield "unexplained breaks are counted without a job"
    for name in ("leaving", "suspects"):
        if not members.issuperset(getattr(cluster, name)):
            yield f"{name} holds {plain(cluster, name) - members}, which are not members"


@reads("stage next_formation member_set job awaiting alive")
def _faults_of_awaiting(cluster: ClusterState) -> Iterator[str]:
    following, awaiting = cluster.next_formation, plain(cluster, "awaiting")
    prepares = cluster.stage is Stage.PREPARING and following is not None
    allowed = frozenset(following.members) if prepares else plain(cluster, "member_set")
    if not awaiting <= allowed:
        yield f"it awaits {awaiting - allowed}, which are not members"
    if not awaiting <= alive(cluster):
        yield f"it awaits {awaiting - alive(cluster)}, which are lost"
    if awaiting and cluster.active is None:
        yield "it awaits members without a job"


@reads("alive member_set newcomers starting leaving stopped failed suspects")
def _faults_of_sets(cluster: ClusterState) -> Iterator[str]:
    living, sets = alive(cluster), {name: plain(cluster, name) for name in WORKER_SETS}
    newcomers, starting, stopped = sets["newcomers"], sets["starting"], sets["stopped"]
    for name, ids in sets.items():
        if not ids <= living:
            yield f"{name} holds {ids - living}, which are lost"
    for name in ("member_set", "newcomers", "starting", "failed"):
        if sets[name] & stopped:
            yield f"{name} holds {sets[name] & stopped}, which were asked to end"
    if newcomers & sets["member_set"] or newcomers & starting:
        yield "a worker waits as a newcomer and is something else too"


def _faults_of_surplus(cluster: ClusterState) -> Iterator[str]:
    wanted = cluster.limits.wanted + (cluster.kept_state is not None)  # a worker more may read the state that was kept
    surplus = len(cluster.workers) - len(cluster.stopped) - len(cluster.leaving) - len(cluster.failed) - wanted
    if surplus <= 0 or cluster.stopping:
        return
    present = cluster.active.name if cluster.active is not None else ""
    over = [worker for worker in cluster.workers.values() if worker.job not in ("", present)]
    lingering = [worker for worker in over if cluster.linger_until and worker.id not in cluster.stopped]
    if len(lingering) < surplus:
        yield f"{len(cluster.workers)} workers live, {wanted} are wanted"


def _faults_of_newcomers(cluster: ClusterState, now: float) -> Iterator[str]:
    for w, until in cluster.held_back.items():
        if until <= now or not (w in cluster.newcomers or w in cluster.starting):
            yield f"{w} is left out though it does not wait, or for longer than it was to be"
        elif not cluster.workers[w].reason or not cluster.workers[w].failures:
            yield f"{w} is left out without a reason"


@reads("workers starting unregistered stopped failed trial setup setup_by stall held_back")
def _faults_of_workers(cluster: ClusterState) -> Iterator[str]:
    starting, unregistered = plain(cluster, "starting"), set[WorkerId]()
    by_state: dict[WorkerState, set[WorkerId]] = {WorkerState.STOPPED: set(), WorkerState.FAILED: set()}
    explained = {*cluster.held_back, *(cluster.stall.stragglers if cluster.stall is not None else ())}
    for w, worker in cluster.workers.items():
        state = worker.state
        if worker.id != w:
            yield "a worker is kept under the name of another"
        if state in by_state:
            by_state[state].add(w)
        if not worker.registered and w in starting:
            unregistered.add(w)
        if worker.reason and state not in by_state and w not in explained:
            yield f"{w} is said to be behind, and is not"
        idle = state is WorkerState.READY and not worker.job
        if idle and (lacking(cluster, worker) is not None or not worker.registered):
            yield f"{w} is ready and not set up"
        if worker.failed_cell and state not in by_state:
            yield f"a setup cell failed on {w}, and it is {state}"
        if worker.running_cell and state is WorkerState.STARTING and cluster.setup_by == NEVER:
            yield f"{w} runs a setup cell without a deadline"
    if plain(cluster, "unregistered") != unregistered:
        yield f"unregistered are {sorted(cluster.unregistered)}, starting {sorted(starting)}"
    if by_state[WorkerState.STOPPED] != plain(cluster, "stopped"):
        yield "`stopped` is not who is stopped"
    if by_state[WorkerState.FAILED] != plain(cluster, "failed"):
        yield "`failed` is not who has failed"
    if cluster.trial is not None and not cluster.trial.running:
        yield "no worker runs the cell that is on trial"
    if len({cell.key for cell in cluster.setup}) != len(cluster.setup):
        yield "two setup cells have the same key"


@reads("alive hosts")
def _faults_of_hosts(cluster: ClusterState) -> Iterator[str]:
    living: dict[str, set[tuple[int, int]]] = {name: set() for name in cluster.hosts}
    for w in alive(cluster):
        if w.host not in living:
            yield "a worker lives on no host"
        else:
            living[w.host].add((w.slot, w.incarnation))
    for name, host in cluster.hosts.items():
        busy = {(number, slot.incarnation) for number, slot in enumerate(host.slots) if slot.busy}
        if busy != living[name] or host.spec.name != name:
            yield f"{name}'s busy slots are not its living workers"
        if host.full != all(slot.busy for slot in host.slots[: host.spec.slots]):
            yield f"{name} is full or not, and does not know it"
        if host.phase is HostPhase.LOST and busy:
            yield f"{name} is lost and has workers"


def _faults_of_ends(cluster: ClusterState, now: float) -> Iterator[str]:
    for name, ending in cluster.ending.items():
        host = cluster.hosts.get(name)
        if not ending.successor and (host is None or host.phase is not HostPhase.DRAINING):
            yield f"{name} is announced to end, and does not drain"
        if now > ending.at:
            yield f"{name} is kept beyond its end"


@reads("wake_at workers starting wait awaiting stage generation stopping end_deadlines stopped limits")
def _faults_of_waiting(cluster: ClusterState) -> Iterator[str]:
    wait, awaiting, stopped = cluster.wait, plain(cluster, "awaiting"), plain(cluster, "stopped")
    if any(cluster.wake_at > arrivals.worker_deadline(cluster, w) for w in cluster.starting):
        yield f"no deadline for the start of {sorted(cluster.starting)}"
    if wait is not None and (wait.stage, wait.generation, wait.awaited) != (
        cluster.stage,
        cluster.generation,
        len(awaiting),
    ):
        yield f"it waits in {wait.stage} of generation {wait.generation} for {wait.awaited}"
    if not cluster.stopping and cluster.end_deadlines.keys() != stopped:
        yield f"{stopped ^ cluster.end_deadlines.keys()} are asked to end, without a deadline"


def _faults_of_endless_waits(cluster: ClusterState, now: float) -> Iterator[str]:
    """Each wait for a message has a deadline, unless too few workers are ready and the user allows it."""
    if cluster.limits.elastic_timeout is None:
        return
    job, awaiting = cluster.active, plain(cluster, "awaiting")
    told = job.asked_to_stop | job.succeeded if job is not None else ()  # their programs are about to end
    waits = job is not None and cluster.stage is not Stage.RUNNING and any(w not in told for w in awaiting)
    trains = cluster.stage is Stage.HALTED and len(awaiting) == len(cluster.members)  # to the halt
    if waits and not trains and deadline(cluster, now) == NEVER:
        yield f"{cluster.stage} waits for {cluster.awaiting} without end"
    busy = cluster.timeout_paused_since is not None and not (
        cluster.members or cluster.newcomers
    )  # in what comes before the loop
    finishes = job is not None and job.succeeded  # what its programs do after the elastic function may take any time
    if (
        job is not None
        and cluster.stage is Stage.GATHERING
        and not (busy or finishes)
        and deadline(cluster, now) == NEVER
    ):
        yield "there is no world, and no deadline"


@reads("hosts external_address stopping")
def _faults_of_addresses(cluster: ClusterState) -> Iterator[str]:
    is_wide = wide(cluster)
    for name, host in cluster.hosts.items():
        there = host.phase in (HostPhase.UP, HostPhase.DRAINING) and not cluster.stopping
        if there and host.addresses and host.address not in [i.address for i in host.addresses]:
            yield f"{name} is used at {host.address!r}, which is none of its addresses"
        if there and is_wide and is_loopback(host.address) and external_addresses(host):
            yield f"{name} is on {host.address} though others are on other machines"
        if there and host.agreed_addresses and host.address not in host.agreed_addresses:
            yield f"{name} is at {host.address}, where not all have reached it"


def _faults_of_probes(cluster: ClusterState, now: float) -> Iterator[str]:
    for name, admission in cluster.probing.items():
        host = cluster.hosts.get(name)
        if host is None or host.phase is not HostPhase.STARTING or "probed with" not in host.reason:
            yield f"{name} is probed, but does not wait for that"
        if now >= admission.until or not admission.awaited:
            yield f"{name} waits for probes that are over"
        if not all(partner in cluster.hosts and cluster.hosts[partner].is_up for partner in admission.partners):
            yield f"{name} is probed with hosts that are lost or have gone: {admission.partners}"


@reads("reason stall generation")
def _faults_of_reasons(cluster: ClusterState) -> Iterator[str]:
    if not in_words(cluster.reason, 0.0):
        yield "there is no reason"
    still = cluster.stall
    if still is not None and (
        still.generation != cluster.generation or still.text not in in_words(cluster.reason, 0.0)
    ):
        yield "a world stands still and does not say so, or another one does"


@reads("halt stage awaiting member_set job")
def _faults_of_halts(cluster: ClusterState) -> Iterator[str]:
    halt = cluster.halt
    if halt.running and not (cluster.stands_still and halt.cells and halt.until < NEVER):
        yield f"a cell runs in {cluster.stage}, or without a deadline"
    if not halt.running and (halt.until < NEVER or halt.ended):
        yield "the deadline or the results of a cell are kept after its end"
    if halt.running and not frozenset(halt.running) <= plain(cluster, "member_set"):
        yield f"a cell runs on {halt.running - cluster.member_set}, which are not members"
    if halt.asked and cluster.stage is not Stage.ASKED:
        yield f"a halt was asked for in {cluster.stage}"
    if cluster.stands_still and not (halt.running or halt.paused_by):
        yield "the members stand still for nothing"
    if cluster.active is None and (halt.cells or halt.paused_by):
        yield "there are cells or a pause without a job"


LOOKS = (
    _faults_of_generations,
    _faults_of_sets,
    _faults_of_awaiting,
    _faults_of_workers,
    _faults_of_hosts,
    _faults_of_waiting,
    _faults_of_addresses,
    _faults_of_reasons,
    _faults_of_halts,
)


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
            most = cluster.limits.most + (cluster.limits.most == 1 and members[0] in before.leaving | cluster.leaving)
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
