"""A new driver for a cluster whose driver is gone: the world as its agents and workers tell it.

Of what was saved only that counts which nobody else can know: the limits, which hosts are wanted, the job's name. Who lives,
who trains with whom and how far they are is what they say themselves. A world that is whole goes on undisturbed; one that is
not is broken like any other in which somebody has died, and its survivors gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import epochs, jobs, staffing
from nbelastic.core import messages as m
from nbelastic.core.addresses import is_loopback
from nbelastic.core.membership import step
from nbelastic.core.wire import AgentHello, WorkerHere
from nbelastic.core.world import Host, HostPhase, Job, Limits, Slot, Stage, Worker, WorkerState, World, first, seat

Commands = list[m.Command]
GONE = "while no driver was there"


class SavedHost(Struct, frozen=True):
    """`newest`: the highest incarnation of its workers so far. `leaving`: it was to be drained."""

    spec: m.HostSpec
    joined: int
    by_hand: bool
    newest: int
    leaving: bool


class SavedWorld(Struct, frozen=True):
    """What of a world its agents and workers cannot know."""

    limits: Limits = Limits()
    hosts: tuple[SavedHost, ...] = ()
    removed: tuple[str, ...] = ()
    incarnations: dict[str, int] = {}
    joined: int = 0
    numbered: int = 0
    members: tuple[m.WorkerId, ...] = ()
    job: str = ""
    outcome: str = ""
    reason: str = ""
    formed: bool = False
    ranks: tuple[m.WorkerId, ...] = ()
    resets: int = 0


def summary(world: World) -> SavedWorld:
    """Of this one."""
    hosts = tuple(
        SavedHost(
            host.spec,
            host.joined,
            host.by_hand,
            max((slot.incarnation for slot in host.slots), default=0),
            host.phase is HostPhase.DRAINING,
        )
        for host in world.hosts.values()
    )
    job = world.job or Job("")
    return SavedWorld(
        world.limits,
        hosts,
        tuple(sorted(world.removed)),
        world.incarnations,
        world.joined,
        world.numbered,
        world.members,
        job.name,
        job.outcome,
        job.reason,
        job.formed,
        job.ranks,
        world.resets,
    )


def missing(saved: SavedWorld, agents: Mapping[str, AgentHello], workers: Iterable[m.WorkerId]) -> tuple[str, ...]:
    """Who has not said yet where it is: hosts of which no agent has, and workers of the agents that have."""
    heard = set(workers)
    hosts = [host.spec.name for host in saved.hosts if host.spec.name not in agents]
    return (*hosts, *(str(w) for agent in agents.values() for w, _ in agent.workers if w not in heard))


def resume(
    saved: SavedWorld,
    agents: Mapping[str, AgentHello],
    heard: Mapping[m.WorkerId, WorkerHere],
    set_up: frozenset[m.WorkerId],
    now: float,
) -> tuple[World, tuple[m.Command, ...]]:
    """The world at `now` and what is to be done. `set_up`: the workers on which the setup cells have run."""
    out: Commands = []
    world = _workers(_hosts(saved, agents, now), agents, heard, set_up, now)
    job = world.active
    if job is not None:
        inside = {w: here for w, here in heard.items() if w in world.workers and here.job == job.name}
        world = _world(world, inside, now, out)
        world = _send_on(world, inside, now, out)
    world = _lost(world, saved, heard, now, out)
    world = _stop_others(world, now, out)
    for host in saved.hosts:
        if host.leaving and host.spec.name in world.hosts:
            world = _then(world, m.HostRemoved(host.spec.name), now, out)
    world = staffing.staff(world, now, out)
    return _then(world, m.Ticked(), now, out), tuple(out)


def _then(world: World, event: m.Event, now: float, out: Commands) -> World:
    world, commands = step(world, event, now)
    out.extend(commands)
    return world


def _hosts(saved: SavedWorld, agents: Mapping[str, AgentHello], now: float) -> World:
    hosts = {}
    for number, old in enumerate(sorted(saved.hosts, key=lambda host: host.joined), 1):
        name = old.spec.name
        agent = agents.get(name)
        if agent is None:
            slots = (Slot(incarnation=old.newest),) * old.spec.slots
            hosts[name] = Host(
                old.spec,
                old.joined,
                slots,
                phase=HostPhase.LOST,
                reason=f"its agent was lost {GONE}",
                retry_at=now,
                by_hand=old.by_hand,
            )
            continue
        busy = {w.slot for w, _ in agent.workers}
        count = max([old.spec.slots, *(slot + 1 for slot in busy), *(slot + 1 for slot in agent.newest)])
        slots = tuple(Slot(incarnation=agent.newest.get(i, old.newest), busy=i in busy) for i in range(count))
        address = agent.address or (agent.addresses[0].address if agent.addresses else "")
        hosts[name] = Host(
            old.spec,
            old.joined,
            slots,
            full=all(slot.busy for slot in slots[: old.spec.slots]),
            since=now,
            phase=HostPhase.UP,
            by_hand=old.by_hand,
            addresses=agent.addresses,
            port=agent.port,
            address=address,
            agreed=(address,) if address and not is_loopback(address) else (),
            admitted=number,
        )
    job = None
    if saved.job:
        job = Job(saved.job, formed=saved.formed, ranks=saved.ranks, outcome=saved.outcome, reason=saved.reason)
    return World(
        saved.limits,
        hosts=hosts,
        job=job,
        resets=saved.resets,
        joined=saved.joined,
        numbered=saved.numbered,
        admissions=len(hosts),
        removed=frozenset(saved.removed),
        incarnations=saved.incarnations,
        since=now,
    )


def _workers(
    world: World,
    agents: Mapping[str, AgentHello],
    heard: Mapping[m.WorkerId, WorkerHere],
    set_up: frozenset[m.WorkerId],
    now: float,
) -> World:
    """All whom an agent has. Who has not said a word is starting, or will be found to be frozen."""
    workers: dict[m.WorkerId, Worker] = {}
    name = world.active.name if world.active else ""
    for host, agent in agents.items():
        for w, pid in agent.workers if host in world.hosts else ():
            here = heard.get(w, WorkerHere(w, pid))
            job = here.job if here.busy or here.job == name else ""
            state = WorkerState.READY if w in set_up or job else WorkerState.STARTING
            if job and here.epoch:
                state = WorkerState.RUNNING
            workers[w] = Worker(
                w,
                state,
                since=now,
                pid=pid,
                job=job,
                epoch=here.left,
                commit=here.commit,
                store=here.store,
                has_state=bool(job) and here.holds,
            )
    starting = frozenset(w for w, worker in workers.items() if worker.state is WorkerState.STARTING)
    numbered = max([world.numbered, *(here.numbered for here in heard.values())])
    return replace(world, workers=workers, starting=starting, numbered=numbered)


def _world(world: World, inside: Mapping[m.WorkerId, WorkerHere], now: float, out: Commands) -> World:
    """Who trains with whom. `inside`: those in the job's program."""
    job = world.active
    assert job is not None
    holders = [w for w in sorted(inside, key=lambda w: (inside[w].rank, w)) if inside[w].holds]
    if not holders:
        return jobs.end(world, "failed", _nobody(), now, out) if job.formed else world
    epoch = max(inside[w].epoch for w in holders)
    finished = frozenset(w for w in holders if isinstance(inside[w].word, m.WorkerSucceeded))
    job = replace(job, formed=True, succeeded=finished, ranks=tuple(holders))
    world = replace(seat(world, tuple(holders)), job=job, stage=Stage.RUNNING)
    if _whole(inside, epoch):
        order = m.FormWorld(epoch, tuple(holders), "", 0, ())
        for later in range(epoch + 1, world.numbered + 1):  # prepared, and not to be
            out.append(m.DropWorld(later, tuple(inside)))
        if any(here.bound for here in inside.values()):
            out.append(m.Stay(epoch, world.members))
        text = f"{len(holders)} workers train on in epoch {epoch}"
        out.append(m.Record("world-found", text, epoch=epoch))
        return replace(world, epoch=epoch, order=order)
    # an abort counts for older epochs too, and so reaches whoever was on the way to another
    world = replace(world, epoch=world.numbered)
    newcomers = tuple(w for w in inside if w not in world.ranked)
    if newcomers:
        out.append(m.AbortWorld(world.epoch, newcomers, "a new driver forms the world anew"))
    return epochs.break_epoch(world, "the world was not whole any more when a new driver came", now, out)


def _nobody() -> str:
    return f"no worker is left that holds the training state: the last one was lost {GONE}"


def _whole(inside: Mapping[m.WorkerId, WorkerHere], epoch: int) -> bool:
    """All members of the epoch are in it, and nobody else holds the state. An error of the user's own takes nothing from that."""
    group = [here for here in inside.values() if here.holds or here.epoch]
    ranks = sorted(here.rank for here in group)
    return all(here.epoch == epoch and here.formed and _calm(here.word) for here in group) and ranks == list(
        range(group[0].size)
    )


def _calm(word: object) -> bool:
    return not isinstance(word, m.WorkerReady) and (not isinstance(word, m.WorkerRaised) or word.intact)


def _send_on(world: World, inside: Mapping[m.WorkerId, WorkerHere], now: float, out: Commands) -> World:
    """Their last words are heard now; who has not heard of the job yet is told."""
    on_the_way = (w for w, here in inside.items() if here.busy and w not in world.ranked)
    world = replace(world, starting=world.starting.union(on_the_way))
    for here in inside.values():
        if here.word is not None and not isinstance(here.word, m.WorkerSucceeded):
            world = _then(world, here.word, now, out)
    for w, worker in list(world.workers.items()):
        if worker.state is WorkerState.READY and not worker.job:
            world = jobs.run_next(world, w, out)
    return world


def _lost(world: World, saved: SavedWorld, heard: Mapping[m.WorkerId, WorkerHere], now: float, out: Commands) -> World:
    """Members that are gone, or that do not answer though their processes live."""
    gone = frozenset(w for w in saved.members if w not in world.workers)
    if gone:
        out.append(m.Record("worker-lost", f"{first(gone)} lost {GONE}"))
    for w in saved.members:
        if w in world.workers and w not in heard:
            world = _then(world, m.WorkerFroze(w, "it did not answer a new driver"), now, out)
    return world


def _stop_others(world: World, now: float, out: Commands) -> World:
    """Programs of a job that is over."""
    name = world.active.name if world.active else ""
    late = tuple(w for w, worker in world.workers.items() if worker.job and worker.job != name)
    for w in late:
        out.append(m.StopProgram(world.workers[w].job, (w,), "its job is over"))
    return replace(world, linger_until=now + world.limits.leave) if late else world
