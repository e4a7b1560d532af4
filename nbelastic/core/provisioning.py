"""Which agents and workers should be alive: hosts, slots, strikes and cooldowns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nsmallest
from itertools import islice

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.holders import keeper
from nbelastic.core.reasons import MOST, Missing
from nbelastic.core.state import Host, HostPhase, Slot, Worker, WorkerState, World, less
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]
AGENT_RETRY = 1.0  # seconds; an agent that cannot start is never tried in a hot loop, whatever the cooldown
NAMES = 1000  # of hosts that have left whose newest incarnations are known one by one
FORGOTTEN = ""  # stands for all others: none of their workers had a higher incarnation
MOST_DOUBLINGS = 60  # of a cooldown: more would not fit into a float


def add(world: World, spec: HostSpec, now: float, out: Commands, *, by: str, by_hand: bool) -> World:
    """A new host; or an old one: with another number of slots, pardoned, its drain taken back."""
    old = world.hosts.get(spec.name)
    unused = Slot(incarnation=world.incarnations.get(spec.name, world.incarnations.get(FORGOTTEN, 0)))
    if old is None:
        out.append(cmd.Record("host-added", f"{spec.name} with {_slots(spec.slots)} by {by}", host=spec.name))
        out.append(cmd.StartAgent(spec))
        host = Host(spec, joined=world.joined, slots=(unused,) * spec.slots, since=now, by_hand=by_hand)
        return replace(world, joined=world.joined + 1, hosts={**world.hosts, spec.name: host})
    slots = tuple(replace(slot, strikes=0, cooling_until=0.0, reason="") for slot in old.slots)
    slots += (unused,) * (spec.slots - len(slots))
    phase = HostPhase.UP if old.phase is HostPhase.DRAINING else old.phase
    reason = old.reason if spec.name in world.probing else ""
    host = replace(old, spec=spec, phase=phase, strikes=0, retry_at=0.0, by_hand=by_hand, reason=reason)
    out.append(cmd.Record("host-changed", f"{spec.name} has {_slots(spec.slots)} now, by {by}", host=spec.name))
    world = place(world, _fit(host, slots))
    back = frozenset(w for w in world.leaving if w.host == spec.name and w.slot < spec.slots)
    world = replace(world, leaving=world.leaving - back)
    return dismiss(world, [w for w in on_host(world, spec.name) if w.slot >= spec.slots], now, out)


def discovered(world: World, specs: tuple[HostSpec, ...], now: float, out: Commands) -> World:
    """Discovery lists these. What people added or removed by hand stays as they wanted it."""
    listed = {spec.name for spec in specs}
    world = replace(world, removed=world.removed & listed)
    for name, host in list(world.hosts.items()):
        if name not in listed and not host.by_hand and host.phase is not HostPhase.DRAINING:
            world = drain(world, name, "at the next commit", "discovery", out)
            world = retire_empty(dismiss(world, on_host(world, name), now, out), name, out)
    for spec in specs:
        old = world.hosts.get(spec.name)
        if spec.name in world.removed or (old and old.spec == spec and old.phase is not HostPhase.DRAINING):
            continue
        world = add(world, spec, now, out, by="discovery", by_hand=old is not None and old.by_hand)
    return world


def drain(world: World, name: str, how: str, by: str, out: Commands) -> World:
    """The host is to leave: nothing new is started on it."""
    out.append(cmd.Record("host-removed", f"{name} is to leave {how}, by {by}", host=name))
    return place(world, replace(world.hosts[name], phase=HostPhase.DRAINING, reason="draining"))


def on_host(world: World, name: str) -> tuple[WorkerId, ...]:
    """Its workers that live, by slot."""
    slots = world.hosts[name].slots
    ids = (WorkerId(name, index, slot.incarnation) for index, slot in enumerate(slots) if slot.busy)
    return tuple(w for w in ids if w in world.workers)


def dismiss(world: World, workers: Iterable[WorkerId], now: float, out: Commands) -> World:
    """Members leave with the next planned change, the others at once."""
    chosen = frozenset(workers)
    members = chosen & world.ranked
    if members - world.leaving and not world.waiting:
        world = replace(world, since=now)
    world = replace(world, leaving=world.leaving | members)
    return stop_workers(world, sorted(chosen - members), out)


def stop_workers(world: World, ids: Iterable[WorkerId], out: Commands, *, kill: bool = False) -> World:
    """They, no members, are told to end; their exit will be no strike."""
    workers = world.workers
    chosen = [w for w in ids if w in workers and (kill or w not in world.stopped)]
    if not chosen:
        return world
    workers = workers | {w: replace(workers[w], state=WorkerState.STOPPED) for w in chosen}
    out.extend(cmd.StopWorker(w, kill=kill) for w in chosen)
    gone = frozenset(chosen)
    return replace(
        world,
        workers=workers,
        stopped=world.stopped | gone,
        waiting=less(world.waiting, gone),
        starting=less(world.starting, gone),
        failed=less(world.failed, gone),
    )


def retire_empty(world: World, name: str, out: Commands) -> World:
    """A draining host without workers is gone."""
    host = world.hosts.get(name)
    if host is None or host.phase is not HostPhase.DRAINING or world.stopping or on_host(world, name):
        return world
    if name == keeper(world):
        return world
    out.append(cmd.StopAgent(name))
    out.append(cmd.Record("host-gone", f"{name} has left", host=name))
    return _forget(world, name)


def admit(world: World, host: Host, text: str, now: float, out: Commands) -> World:
    """The host may be used: its workers are started."""
    name, number = host.spec.name, world.admissions + 1
    out.append(cmd.Record("host-up", text, host=name))
    host = replace(host, phase=HostPhase.UP, reason="", since=now, admitted=number)
    world = place(_stop_probing(world, name), host)
    return staff(replace(world, admissions=number), now, out)


def agent_lost(world: World, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost") -> World:
    """The host is gone; it is tried again after a cooldown, unless it was to leave anyway."""
    host, world = world.hosts[name], _stop_probing(world, name)
    if host.phase is HostPhase.DRAINING:
        out.append(cmd.Record("host-gone", f"{name} has left ({reason})", host=name))
        return _forget(world, name)
    forgiven = host.phase is HostPhase.UP and now - host.since >= world.limits.healthy
    strikes = 1 if forgiven else host.strikes + 1
    wait = max(AGENT_RETRY, _cooldown(world, strikes))
    out.append(cmd.Record(kind, f"{name}: {reason}; tried again in {wait:g} s", host=name))
    host = replace(host, phase=HostPhase.LOST, reason=reason, strikes=strikes, retry_at=now + wait)
    world = replace(world, wake_at=min(world.wake_at, host.retry_at))
    return place(world, _fit(host, tuple(replace(slot, busy=False) for slot in host.slots)))


def vacate(world: World, w: WorkerId, *, restarts: int = 0) -> World:
    """Its process is gone: the slot is free."""
    host = world.hosts[w.host]
    slot = host.slots[w.slot]
    return _refit(world, w, replace(slot, busy=False, restarts=slot.restarts + restarts))


def strike(world: World, w: WorkerId, why: str, now: float, out: Commands) -> World:
    """A death against the slot: the first restart comes at once, then the cooldown doubles; a healthy spell forgives."""
    slot = world.hosts[w.host].slots[w.slot]
    healthy = now - world.workers[w].since >= world.limits.healthy
    strikes = 1 if healthy else slot.strikes + 1
    wait = _cooldown(world, strikes - 1)
    slot = replace(slot, strikes=strikes, restarts=slot.restarts + 1, busy=False)
    if not wait:
        return _refit(world, w, slot)
    reason = f"slot {w.slot} cools for {wait:g} s after {strikes} deaths: {why}"
    out.append(cmd.Record("slot-cooling", reason, host=w.host, worker=str(w)))
    world = _refit(world, w, replace(slot, cooling_until=now + wait, reason=reason))
    return place(world, replace(world.hosts[w.host], reason=reason))


def hold_back(world: World, ids: Iterable[WorkerId], why: str, now: float, out: Commands) -> World:
    """These newcomers are left out for a while: those who train with one another do not wait for them."""
    # (they may have to come out of an epoch first, and are among `starting` until they have)
    workers, held = dict(world.workers), dict(world.held)
    for w in ids:
        failures = workers[w].failures + 1
        wait = max(AGENT_RETRY, _cooldown(world, failures))
        text = f"{w} is left out: {why}; tried again in {wait:g} s"
        out.append(cmd.Record("newcomer-held", text, host=w.host, worker=str(w), epoch=world.epoch))
        workers[w] = replace(workers[w], failures=failures, reason=f"left out: {why}")
        held[w] = now + wait
    return replace(world, workers=workers, held=held)


def let_in(world: World, now: float) -> World:
    """Newcomers that were left out may try again when their time has come; those that are gone are forgotten."""
    if not world.held:
        return world
    held = {w: until for w, until in world.held.items() if now < until and (w in world.waiting or w in world.starting)}
    if len(held) == len(world.held):
        return world
    back = [w for w in world.held if w not in held and w in world.workers]
    unblamed = {w: replace(world.workers[w], reason="") for w in back if w not in world.failed}
    return replace(world, held=held, workers=world.workers | unblamed)


def _cooldown(world: World, strikes: int) -> float:
    low, high = world.limits.cooldown
    return min(high, low * 2.0 ** min(strikes - 1, MOST_DOUBLINGS)) if strikes > 0 else 0.0


def staff(world: World, now: float, out: Commands) -> World:
    """Start agents and workers up to what is wanted and allowed; let go what is above it. O(hosts)."""
    if world.stopping:
        return world
    world = _shed(world, now, out)
    wanted = world.limits.wanted - _staying(world)
    lacking = keeper(world) if _lacks_heir(world) else None
    changed: dict[str, Host] = {}
    started: list[WorkerId] = []

    def room(name: str, host: Host) -> float:
        """How many may be started there."""
        if name == lacking and host.phase in (HostPhase.UP, HostPhase.DRAINING):
            return max(1, wanted - len(started))
        return wanted - len(started) if host.phase is HostPhase.UP else 0

    wake = min((comes_by(world, w) for w in world.starting), default=NEVER)
    for name, host in _in_turn(world):
        if host.phase is HostPhase.LOST and host.retry_at <= now:
            out.append(cmd.StartAgent(host.spec))
            changed[name] = replace(host, phase=HostPhase.STARTING, since=now)
            wake = min(wake, now + world.limits.timeouts.agent)
        elif host.phase is HostPhase.LOST:
            wake = min(wake, host.retry_at)
        elif host.phase is HostPhase.STARTING:
            wake = min(wake, speaks_by(world, host))
        elif not host.full and room(name, host) > 0:
            filled, fresh, cooled_at = _fill(host, room(name, host), now)
            wake = min(wake, cooled_at)
            if fresh:
                changed[name] = filled
                started += fresh
    if started:
        wake = min(wake, now + world.limits.timeouts.worker)
    if not changed:
        return world if world.wake_at == wake else replace(world, wake_at=wake)
    out.extend(cmd.StartWorker(w) for w in started)
    return replace(
        world,
        hosts={**world.hosts, **changed},
        workers=world.workers | {w: Worker(w, WorkerState.STARTING, since=now) for w in started},
        starting=world.starting.union(started),
        wake_at=wake,
    )


def _in_turn(world: World) -> Iterable[tuple[str, Host]]:
    """By seniority; but first the host that keeps the training state, which only a worker there can take."""
    first = keeper(world)
    return world.hosts.items() if not first else sorted(world.hosts.items(), key=lambda item: item[0] != first)


def _lacks_heir(world: World) -> bool:
    """Whether nobody lives on the host that keeps the training state: then a worker is started there, wanted or not."""
    name = keeper(world)
    return name in world.hosts and all(w in world.stopped or w in world.failed for w in on_host(world, name))


def too_many(asked: int, room: int) -> str:
    """One line for more workers than the driver's machine has open files for."""
    return (
        f"{asked} workers are asked for, and only {room} fit: each needs 6 open files in ipyparallel's controller. "
        "Raise the hard limit of open files here (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in a container), "
        "then start the cluster again."
    )


def tell_of_room(before: World, world: World, out: Commands) -> None:
    """Say so when more workers are asked for than before, and more than fit."""
    room, asked = world.limits.room, _asked(world)
    if room is not None and asked > max(room, _asked(before)):
        out.append(cmd.Record("no-room", too_many(asked, room)))


def _asked(world: World) -> int:
    slots = sum(host.spec.slots for host in world.hosts.values() if host.phase is not HostPhase.DRAINING)
    return int(min(slots, world.limits.asked))


def speaks_by(world: World, host: Host) -> float:
    """When its agent must have spoken."""
    silent = host.phase is HostPhase.STARTING and host.spec.name not in world.probing
    return host.since + world.limits.timeouts.agent if silent else NEVER


def comes_by(world: World, w: WorkerId) -> float:
    """When its engine must have come; or when it must be out of an epoch that it was told to leave as a newcomer."""
    worker, timeouts = world.workers[w], world.limits.timeouts
    match worker.state:
        case WorkerState.STARTING if not worker.registered:  # what it runs then has deadlines of its own
            return worker.since + timeouts.worker
        case WorkerState.RUNNING:
            return worker.since + timeouts.recover
    return NEVER


def expect(world: World, ids: Collection[WorkerId]) -> World:
    """These workers are on their way to the elastic loop, each with the deadline of `comes_by`."""
    wake = min((comes_by(world, w) for w in ids), default=NEVER)
    return replace(world, starting=world.starting.union(ids), wake_at=min(world.wake_at, wake))


def _fill(host: Host, wanted: float, now: float) -> tuple[Host, list[WorkerId], float]:
    """Take up to `wanted` free slots. Also says when the next cooling one may be tried."""
    slots = list(host.slots)
    started: list[WorkerId] = []
    for index, slot in enumerate(slots[: host.spec.slots]):
        if slot.busy or slot.cooling_until > now or len(started) >= wanted:
            continue
        started.append(WorkerId(host.spec.name, index, slot.incarnation + 1))
        slots[index] = replace(slot, incarnation=slot.incarnation + 1, busy=True, cooling_until=0.0, reason="")
    cooling = [slot for slot in slots[: host.spec.slots] if slot.cooling_until > now]
    reason = cooling[0].reason if cooling else ""
    cooled_at = min((slot.cooling_until for slot in cooling), default=NEVER)
    return replace(_fit(host, tuple(slots)), reason=reason), started, cooled_at


def _staying(world: World) -> int:
    """How many workers are alive and not on their way out."""
    return len(world.workers) - len(world.stopped) - len(world.leaving)


def _shed(world: World, now: float, out: Commands) -> World:
    """More workers than wanted: let the youngest go, those without a rank first; then members above max, highest first."""
    limits = world.limits
    if limits.max is None:
        return world
    if len(world.members) - len(world.leaving) > limits.max:
        staying = [w for w in world.members if w not in world.leaving]
        world = dismiss(world, staying[limits.max :], now, out)
    surplus = _staying(world) - int(limits.wanted)
    if surplus <= 0:
        return world
    busy = world.ranked | world.stopped | world.failed
    idle = (w for w in reversed(world.workers) if w not in busy and w.host != keeper(world))
    return stop_workers(world, list(islice(idle, surplus)), out)


def missing(world: World, now: float) -> tuple[Missing, ...]:
    """What one waits for, the first of it."""
    found = [_awaited(world.workers[w]) for w in nsmallest(MOST, world.starting)]
    for name, host in world.hosts.items():
        if len(found) >= MOST:
            break
        if host.phase is HostPhase.STARTING:
            found.append(
                Missing("probed", name, host.reason) if name in world.probing else Missing("host starting", name)
            )
        elif host.phase is HostPhase.LOST:
            found.append(Missing("lost", name, host.reason, until=host.retry_at))
        elif not host.full:
            found += [
                Missing("cooling", f"{name}/{index}", until=slot.cooling_until)
                for index, slot in enumerate(host.slots[: host.spec.slots])
                if slot.cooling_until > now
            ]
    job = world.active.name if world.active else ""
    if world.linger_until and any(worker.job not in ("", job) for worker in world.workers.values()):
        found.append(Missing("programs"))
    found += [Missing("failed", str(w), world.workers[w].reason) for w in nsmallest(1, world.failed)]
    return tuple(found[:MOST])


def _awaited(worker: Worker) -> Missing:
    if worker.cell:
        return Missing("in a setup cell", str(worker.id), since=worker.cell_since)
    return Missing("starting", str(worker.id), since=worker.since)


def coming(world: World) -> bool:
    """Whether some worker is on its way."""
    return bool(world.starting) or any(host.phase is HostPhase.STARTING for host in world.hosts.values())


def settled(world: World, now: float) -> bool:
    """Whether ready newcomers, and leavers, have waited long enough for those that are still starting."""
    return now >= world.since + world.limits.timeouts.settle or not coming(world)


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def _fit(host: Host, slots: tuple[Slot, ...]) -> Host:
    return replace(host, slots=slots, full=all(slot.busy for slot in slots[: host.spec.slots]))


def _refit(world: World, w: WorkerId, slot: Slot) -> World:
    host = world.hosts[w.host]
    return place(world, _fit(host, (*host.slots[: w.slot], slot, *host.slots[w.slot + 1 :])))


def place(world: World, host: Host) -> World:
    """With `host` in the place of what was known of it."""
    return replace(world, hosts={**world.hosts, host.spec.name: host})


def _forget(world: World, name: str) -> World:
    """The host is gone. Should it come back, its workers will be new ones."""
    world = _stop_probing(world, name)
    hosts = {n: host for n, host in world.hosts.items() if n != name}
    left = {n: number for n, number in world.incarnations.items() if n != name} | {name: newest(world, name)}
    if len(left) > NAMES:
        oldest = next(n for n in left if n != FORGOTTEN)
        left[FORGOTTEN] = max(left.pop(oldest), left.get(FORGOTTEN, 0))
    return replace(world, hosts=hosts, incarnations=left)


def newest(world: World, name: str) -> int:
    """The highest incarnation of the host's workers so far, those of slots that it no longer has included."""
    return max([world.incarnations.get(name, 0), *(slot.incarnation for slot in world.hosts[name].slots)])


def _stop_probing(world: World, name: str) -> World:
    if name not in world.probing:
        return world
    return replace(world, probing={n: admission for n, admission in world.probing.items() if n != name})
