"""Which agents and workers should be alive: hosts, slots, strikes and cooldowns."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from nbelastic.core import messages as m
from nbelastic.core.world import Host, HostPhase, Slot, Stage, Worker, WorkerState, World

Commands = list[m.Command]
AGENT_RETRY = 1.0  # seconds; an agent that cannot start is never tried in a hot loop, whatever the cooldown


def take_order(
    world: World, event: m.HostAdded | m.HostRemoved | m.HostsDiscovered | m.Scaled, now: float, out: Commands
) -> World:
    """People and discovery change which hosts there are and how many workers may run."""
    if world.stopping:
        return world
    match event:
        case m.HostAdded(host=spec, by=by):
            world = _add(world, spec, now, out, by=by or "discovery", by_hand=True)
        case m.HostRemoved(name=name, now=at_once, by=by):
            world = _remove(world, name, now, out, at_once=at_once, by=by or "discovery")
        case m.HostsDiscovered(hosts=specs):
            names = {spec.name for spec in specs}
            for host in list(world.hosts.values()):
                if host.spec.name not in names and not host.by_hand and host.phase is not HostPhase.DRAINING:
                    world = _remove(world, host.spec.name, now, out, at_once=False, by="discovery")
            for spec in specs:
                old = world.hosts.get(spec.name)
                if old is None or old.spec != spec or old.phase is HostPhase.DRAINING:
                    world = _add(world, spec, now, out, by="discovery", by_hand=old is not None and old.by_hand)
        case m.Scaled(min=low, max=high, by=by):
            out.append(m.Record("scaled", f"min {low}, max {high if high is not None else 'unlimited'} by {by}"))
            world = replace(world, limits=replace(world.limits, min=low, max=high))
    return staff(world, now, out)


def _add(world: World, spec: m.HostSpec, now: float, out: Commands, *, by: str, by_hand: bool) -> World:
    """A new host; or an old one: with another number of slots, pardoned, its drain taken back."""
    old = world.hosts.get(spec.name)
    if old is None:
        out.append(m.Record("host-added", f"{spec.name} with {_slots(spec.slots)} by {by}", host=spec.name))
        out.append(m.StartAgent(spec))
        host = Host(spec, joined=world.joined, slots=(Slot(),) * spec.slots, by_hand=by_hand)
        return replace(world, joined=world.joined + 1, hosts={**world.hosts, spec.name: host})
    slots = tuple(replace(slot, strikes=0, cooling_until=0.0) for slot in old.slots)
    slots = (slots + (Slot(),) * spec.slots)[: max(spec.slots, len(slots))]
    phase = HostPhase.UP if old.phase is HostPhase.DRAINING else old.phase
    host = replace(old, spec=spec, slots=slots, phase=phase, strikes=0, retry_at=0.0, by_hand=by_hand, reason="")
    out.append(m.Record("host-changed", f"{spec.name} has {_slots(spec.slots)} now, by {by}", host=spec.name))
    world = replace(world, hosts={**world.hosts, spec.name: host})
    back = frozenset(w for w in world.leaving if w.host == spec.name and w.slot < spec.slots)
    world = replace(world, leaving=world.leaving - back)
    return dismiss(world, [w for w in world.workers if w.host == spec.name and w.slot >= spec.slots], now, out)


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def _remove(world: World, name: str, now: float, out: Commands, *, at_once: bool, by: str) -> World:
    host = world.hosts.get(name)
    if host is None:
        return world
    how = "at once" if at_once else "at the next commit"
    out.append(m.Record("host-removed", f"{name} is to leave {how}, by {by}", host=name))
    host = replace(host, phase=HostPhase.DRAINING, reason="draining")
    world = replace(world, hosts={**world.hosts, name: host})
    mine = [w for w in world.workers if w.host == name]
    world = stop_workers(world, mine, out, kill=True) if at_once else dismiss(world, mine, now, out)
    return retire_empty(world, name, out)


def dismiss(world: World, workers: Iterable[m.WorkerId], now: float, out: Commands) -> World:
    """Members leave with the next planned change, the others at once."""
    chosen = frozenset(workers)
    members = chosen & frozenset(world.members)
    if members - world.leaving and not world.waiting:
        world = replace(world, since=now)
    world = replace(world, leaving=world.leaving | members)
    return stop_workers(world, sorted(chosen - members), out)


def stop_workers(world: World, ids: Iterable[m.WorkerId], out: Commands, *, kill: bool = False) -> World:
    """They are told to end; their exit will be no strike."""
    workers = dict(world.workers)
    chosen = [w for w in ids if w in workers and (kill or workers[w].state is not WorkerState.STOPPED)]
    for w in chosen:
        workers[w] = replace(workers[w], state=WorkerState.STOPPED)
        out.append(m.StopWorker(w, kill=kill))
    gone = frozenset(chosen)
    return replace(world, workers=workers, waiting=world.waiting - gone, starting=world.starting - gone)


def retire_empty(world: World, name: str, out: Commands) -> World:
    """A draining host without workers is gone."""
    host = world.hosts.get(name)
    if host is None or host.phase is not HostPhase.DRAINING or world.stopping:
        return world
    if any(w.host == name for w in world.workers):
        return world
    out.append(m.StopAgent(name))
    out.append(m.Record("host-gone", f"{name} has left", host=name))
    return replace(world, hosts={n: h for n, h in world.hosts.items() if n != name})


def agent_ready(world: World, name: str, now: float, out: Commands) -> World:
    host = world.hosts.get(name)
    if host is None or host.phase is not HostPhase.STARTING:
        return world
    out.append(m.Record("host-up", f"{name} is up", host=name))
    hosts = {**world.hosts, name: replace(host, phase=HostPhase.UP, reason="")}
    return staff(replace(world, hosts=hosts), now, out)


def agent_lost(
    world: World, name: str, reason: str, now: float, out: Commands
) -> tuple[World, tuple[m.WorkerId, ...]]:
    """The host and every worker on it are gone; it is tried again after a cooldown, unless it was to leave anyway."""
    host = world.hosts.get(name)
    if host is None:
        return world, ()
    gone = tuple(w for w in world.workers if w.host == name)
    if host.phase is HostPhase.DRAINING:
        hosts = {n: h for n, h in world.hosts.items() if n != name}
        return replace(world, hosts=hosts), gone
    out.append(m.Record("host-lost", f"{name}: {reason}", host=name))
    low, high = world.limits.cooldown
    wait = max(AGENT_RETRY, min(high, low * 2**host.strikes))
    slots = tuple(replace(slot, busy=False) for slot in host.slots)
    host = replace(host, phase=HostPhase.LOST, reason=reason, slots=slots, strikes=host.strikes + 1, retry_at=now + wait)
    return replace(world, hosts={**world.hosts, name: host}), gone


def vacate(world: World, w: m.WorkerId, *, slot: Slot | None = None) -> World:
    """Its process is gone: the slot is free, with what `slot` says of strikes."""
    host = world.hosts.get(w.host)
    if host is None or w.slot >= len(host.slots):
        return world
    new = replace(slot or host.slots[w.slot], busy=False)
    slots = (*host.slots[: w.slot], new, *host.slots[w.slot + 1 :])
    slots = slots[: max(host.spec.slots, max((i + 1 for i, s in enumerate(slots) if s.busy), default=0))]
    return replace(world, hosts={**world.hosts, w.host: replace(host, slots=slots)})


def strike(world: World, w: m.WorkerId, now: float) -> World:
    """A death against the slot: the first restart comes at once, then the cooldown doubles; a healthy spell forgives."""
    host = world.hosts.get(w.host)
    if host is None or w.slot >= len(host.slots):
        return world
    slot = host.slots[w.slot]
    low, high = world.limits.cooldown
    before = 0 if now - world.workers[w].since >= world.limits.healthy else slot.strikes
    wait = 0.0 if before == 0 else min(high, low * 2.0 ** (before - 1))
    return vacate(
        world,
        w,
        slot=replace(slot, strikes=before + 1, restarts=slot.restarts + 1, cooling_until=now + wait if wait else 0.0),
    )


def staff(world: World, now: float, out: Commands) -> World:
    """Start agents and workers up to what is wanted and allowed; let go what is above it. O(slots)."""
    if world.stopping:
        return world
    world = _shed(world, now, out)
    wanted = world.limits.wanted - (len(world.workers) - _going(world))
    hosts, workers, starting = dict(world.hosts), dict(world.workers), set(world.starting)
    wake = float("inf")
    for name, host in world.hosts.items():
        if host.phase is HostPhase.LOST:
            if host.retry_at <= now:
                out.append(m.StartAgent(host.spec))
                hosts[name] = replace(host, phase=HostPhase.STARTING)
            else:
                wake = min(wake, host.retry_at)
        if host.phase is not HostPhase.UP or wanted <= 0:
            continue
        slots = list(host.slots)
        for index, slot in enumerate(slots[: host.spec.slots]):
            if slot.busy or wanted <= 0:
                continue
            if slot.cooling_until > now:
                wake = min(wake, slot.cooling_until)
                continue
            w = m.WorkerId(name, index, slot.incarnation + 1)
            slots[index] = replace(slot, incarnation=w.incarnation, busy=True, cooling_until=0.0)
            workers[w] = Worker(w, WorkerState.STARTING, since=now)
            starting.add(w)
            out.append(m.StartWorker(w))
            wanted -= 1
        if slots != list(host.slots):
            hosts[name] = replace(host, slots=tuple(slots))
    return replace(world, hosts=hosts, workers=workers, starting=frozenset(starting), wake_at=wake)


def _going(world: World) -> int:
    """Workers that are alive but on their way out."""
    return len(world.leaving) + sum(worker.state is WorkerState.STOPPED for worker in world.workers.values())


def _shed(world: World, now: float, out: Commands) -> World:
    """More workers than wanted: let the youngest go, those without a rank first; then members above max, highest first."""
    high = world.limits.max
    if high is None:
        return world
    staying = [w for w in world.members if w not in world.leaving]
    if len(staying) > high:
        world = dismiss(world, staying[high:], now, out)
    surplus = len(world.workers) - _going(world) - world.limits.wanted
    if surplus <= 0:
        return world
    members = frozenset(world.members)
    idle = [
        w
        for w, worker in world.workers.items()
        if w not in members and worker.state is not WorkerState.STOPPED and worker.state is not WorkerState.FAILED
    ]
    return stop_workers(world, list(reversed(idle))[: int(surplus)], out)


def shortage(world: World, now: float) -> str:
    """What one waits for, in words, at most three things of it."""
    parts = [f"{w} ({_age(now - world.workers[w].since)})" for w in sorted(world.starting)[:3]]
    for name, host in world.hosts.items():
        if len(parts) >= 3:
            break
        if host.phase is HostPhase.STARTING:
            parts.append(f"{name} to start")
        elif host.phase is HostPhase.LOST:
            parts.append(f"{name} (lost: {host.reason}; tried again in {_age(host.retry_at - now)})")
        for index, slot in enumerate(host.slots):
            if slot.cooling_until > now:
                parts.append(f"{name}/{index} (cooling {_age(slot.cooling_until - now)} more)")
    failed = [w for w in world.workers.values() if w.state is WorkerState.FAILED]
    parts += [f"nothing from {w.id}: {w.reason}" for w in failed[:1]]
    return "waiting for " + ", ".join(parts[:3]) if parts else "add a host or lower min"


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"


def settled(world: World, now: float) -> bool:
    """Whether ready newcomers have waited long enough for those that are still starting."""
    coming = world.starting or any(host.phase is HostPhase.STARTING for host in world.hosts.values())
    return not coming or now - world.since >= world.limits.settle


def full(world: World) -> bool:
    """No room for anybody else."""
    high = world.limits.max
    return high is not None and len(world.members) - len(world.leaving) >= high and world.stage is not Stage.GATHERING
