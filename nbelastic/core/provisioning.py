"""Which agents and workers should be alive: hosts, slots, strikes and cooldowns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nsmallest
from itertools import islice

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.holders import keeper
from nbelastic.core.reasons import MOST, Missing
from nbelastic.core.state import ClusterState, Host, HostPhase, Slot, Worker, WorkerState, less
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.limits import NEVER

Commands = list[cmd.Command]
AGENT_RETRY = 1.0  # seconds; an agent that cannot start is never tried in a hot loop, whatever the cooldown
NAMES = 1000  # of hosts that have left whose newest incarnations are known one by one
FORGOTTEN = ""  # stands for all others: none of their workers had a higher incarnation
MOST_DOUBLINGS = 60  # of a cooldown: more would not fit into a float


def add(cluster: ClusterState, spec: HostSpec, now: float, out: Commands, *, by: str, by_hand: bool) -> ClusterState:
    """A new host; or an old one: with another number of slots, pardoned, its drain taken back."""
    old = cluster.hosts.get(spec.name)
    unused = Slot(incarnation=cluster.incarnations.get(spec.name, cluster.incarnations.get(FORGOTTEN, 0)))
    if old is None:
        out.append(cmd.Record("host-added", f"{spec.name} with {_slots(spec.slots)} by {by}", host=spec.name))
        out.append(cmd.StartAgent(spec))
        host = Host(spec, joined=cluster.joined, slots=(unused,) * spec.slots, since=now, by_hand=by_hand)
        return replace(cluster, joined=cluster.joined + 1, hosts={**cluster.hosts, spec.name: host})
    slots = tuple(replace(slot, failures=0, backoff_until=0.0, reason="") for slot in old.slots)
    slots += (unused,) * (spec.slots - len(slots))
    phase = HostPhase.UP if old.phase is HostPhase.DRAINING else old.phase
    reason = old.reason if spec.name in cluster.probing else ""
    host = replace(old, spec=spec, phase=phase, failures=0, retry_at=0.0, by_hand=by_hand, reason=reason)
    out.append(cmd.Record("host-changed", f"{spec.name} has {_slots(spec.slots)} now, by {by}", host=spec.name))
    cluster = place(cluster, _fit(host, slots))
    back = frozenset(w for w in cluster.leaving if w.host == spec.name and w.slot < spec.slots)
    cluster = replace(cluster, leaving=cluster.leaving - back)
    return dismiss(cluster, [w for w in on_host(cluster, spec.name) if w.slot >= spec.slots], now, out)


def discovered(cluster: ClusterState, specs: tuple[HostSpec, ...], now: float, out: Commands) -> ClusterState:
    """Discovery lists these. What people added or removed by hand stays as they wanted it."""
    listed = {spec.name for spec in specs}
    cluster = replace(cluster, removed=cluster.removed & listed)
    for name, host in list(cluster.hosts.items()):
        if name not in listed and not host.by_hand and host.phase is not HostPhase.DRAINING:
            cluster = drain(cluster, name, "at the next commit", "discovery", out)
            cluster = retire_empty(dismiss(cluster, on_host(cluster, name), now, out), name, out)
    for spec in specs:
        old = cluster.hosts.get(spec.name)
        if spec.name in cluster.removed or (old and old.spec == spec and old.phase is not HostPhase.DRAINING):
            continue
        cluster = add(cluster, spec, now, out, by="discovery", by_hand=old is not None and old.by_hand)
    return cluster


def drain(cluster: ClusterState, name: str, how: str, by: str, out: Commands) -> ClusterState:
    """The host is to leave: nothing new is started on it."""
    out.append(cmd.Record("host-removed", f"{name} is to leave {how}, by {by}", host=name))
    return place(cluster, replace(cluster.hosts[name], phase=HostPhase.DRAINING, reason="draining"))


def on_host(cluster: ClusterState, name: str) -> tuple[WorkerId, ...]:
    """Its workers that live, by slot."""
    slots = cluster.hosts[name].slots
    ids = (WorkerId(name, index, slot.incarnation) for index, slot in enumerate(slots) if slot.busy)
    return tuple(w for w in ids if w in cluster.workers)


def dismiss(cluster: ClusterState, workers: Iterable[WorkerId], now: float, out: Commands) -> ClusterState:
    """Members leave with the next planned change, the others at once."""
    chosen = frozenset(workers)
    members = chosen & cluster.ranked
    if members - cluster.leaving and not cluster.waiting:
        cluster = replace(cluster, since=now)
    cluster = replace(cluster, leaving=cluster.leaving | members)
    return stop_workers(cluster, sorted(chosen - members), out)


def stop_workers(cluster: ClusterState, ids: Iterable[WorkerId], out: Commands, *, kill: bool = False) -> ClusterState:
    """They, no members, are told to end; their exit will be no strike."""
    workers = cluster.workers
    chosen = [w for w in ids if w in workers and (kill or w not in cluster.stopped)]
    if not chosen:
        return cluster
    workers = workers | {w: replace(workers[w], state=WorkerState.STOPPED) for w in chosen}
    out.extend(cmd.StopWorker(w, kill=kill) for w in chosen)
    gone = frozenset(chosen)
    return replace(
        cluster,
        workers=workers,
        stopped=cluster.stopped | gone,
        waiting=less(cluster.waiting, gone),
        starting=less(cluster.starting, gone),
        failed=less(cluster.failed, gone),
    )


def retire_empty(cluster: ClusterState, name: str, out: Commands) -> ClusterState:
    """A draining host without workers is gone."""
    host = cluster.hosts.get(name)
    if host is None or host.phase is not HostPhase.DRAINING or cluster.stopping or on_host(cluster, name):
        return cluster
    if name == keeper(cluster):
        return cluster
    out.append(cmd.StopAgent(name))
    out.append(cmd.Record("host-gone", f"{name} has left", host=name))
    return _forget(cluster, name)


def admit(cluster: ClusterState, host: Host, text: str, now: float, out: Commands) -> ClusterState:
    """The host may be used: its workers are started."""
    name, number = host.spec.name, cluster.admissions + 1
    out.append(cmd.Record("host-up", text, host=name))
    host = replace(host, phase=HostPhase.UP, reason="", since=now, admitted=number)
    cluster = place(_stop_probing(cluster, name), host)
    return staff(replace(cluster, admissions=number), now, out)


def agent_lost(
    cluster: ClusterState, name: str, reason: str, now: float, out: Commands, *, kind: str = "host-lost"
) -> ClusterState:
    """The host is gone; it is tried again after a cooldown, unless it was to leave anyway."""
    host, cluster = cluster.hosts[name], _stop_probing(cluster, name)
    if host.phase is HostPhase.DRAINING:
        out.append(cmd.Record("host-gone", f"{name} has left ({reason})", host=name))
        return _forget(cluster, name)
    forgiven = host.phase is HostPhase.UP and now - host.since >= cluster.limits.healthy
    failures = 1 if forgiven else host.failures + 1
    wait = max(AGENT_RETRY, _cooldown(cluster, failures))
    out.append(cmd.Record(kind, f"{name}: {reason}; tried again in {wait:g} s", host=name))
    host = replace(host, phase=HostPhase.LOST, reason=reason, failures=failures, retry_at=now + wait)
    cluster = replace(cluster, wake_at=min(cluster.wake_at, host.retry_at))
    return place(cluster, _fit(host, tuple(replace(slot, busy=False) for slot in host.slots)))


def vacate(cluster: ClusterState, w: WorkerId, *, restarts: int = 0) -> ClusterState:
    """Its process is gone: the slot is free."""
    host = cluster.hosts[w.host]
    slot = host.slots[w.slot]
    return _refit(cluster, w, replace(slot, busy=False, restarts=slot.restarts + restarts))


def record_failure(cluster: ClusterState, w: WorkerId, why: str, now: float, out: Commands) -> ClusterState:
    """A death against the slot: the first restart comes at once, then the cooldown doubles; a healthy spell forgives."""
    slot = cluster.hosts[w.host].slots[w.slot]
    healthy = now - cluster.workers[w].since >= cluster.limits.healthy
    failures = 1 if healthy else slot.failures + 1
    wait = _cooldown(cluster, failures - 1)
    slot = replace(slot, failures=failures, restarts=slot.restarts + 1, busy=False)
    if not wait:
        return _refit(cluster, w, slot)
    reason = f"slot {w.slot} in back-off for {wait:g} s after {failures} failures: {why}"
    out.append(cmd.Record("slot-backoff", reason, host=w.host, worker=str(w)))
    cluster = _refit(cluster, w, replace(slot, backoff_until=now + wait, reason=reason))
    return place(cluster, replace(cluster.hosts[w.host], reason=reason))


def hold_back(cluster: ClusterState, ids: Iterable[WorkerId], why: str, now: float, out: Commands) -> ClusterState:
    """These newcomers are left out for a while: those who train with one another do not wait for them."""
    # (they may have to come out of a generation first, and are among `starting` until they have)
    workers, held = dict(cluster.workers), dict(cluster.held)
    for w in ids:
        failures = workers[w].failures + 1
        wait = max(AGENT_RETRY, _cooldown(cluster, failures))
        text = f"{w} is left out: {why}; tried again in {wait:g} s"
        out.append(cmd.Record("newcomer-held", text, host=w.host, worker=str(w), generation=cluster.generation))
        workers[w] = replace(workers[w], failures=failures, reason=f"left out: {why}")
        held[w] = now + wait
    return replace(cluster, workers=workers, held=held)


def let_in(cluster: ClusterState, now: float) -> ClusterState:
    """Newcomers that were left out may try again when their time has come; those that are gone are forgotten."""
    if not cluster.held:
        return cluster
    held = {
        w: until for w, until in cluster.held.items() if now < until and (w in cluster.waiting or w in cluster.starting)
    }
    if len(held) == len(cluster.held):
        return cluster
    back = [w for w in cluster.held if w not in held and w in cluster.workers]
    unblamed = {w: replace(cluster.workers[w], reason="") for w in back if w not in cluster.failed}
    return replace(cluster, held=held, workers=cluster.workers | unblamed)


def _cooldown(cluster: ClusterState, failures: int) -> float:
    low, high = cluster.limits.cooldown
    return min(high, low * 2.0 ** min(failures - 1, MOST_DOUBLINGS)) if failures > 0 else 0.0


def staff(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Start agents and workers up to what is wanted and allowed; let go what is above it. O(hosts)."""
    if cluster.stopping:
        return cluster
    cluster = _shed(cluster, now, out)
    wanted = cluster.limits.wanted - _staying(cluster)
    lacking = keeper(cluster) if _lacks_heir(cluster) else None
    changed: dict[str, Host] = {}
    started: list[WorkerId] = []

    def room(name: str, host: Host) -> float:
        """How many may be started there."""
        if name == lacking and host.phase in (HostPhase.UP, HostPhase.DRAINING):
            return max(1, wanted - len(started))
        return wanted - len(started) if host.phase is HostPhase.UP else 0

    wake = min((comes_by(cluster, w) for w in cluster.starting), default=NEVER)
    for name, host in _in_turn(cluster):
        if host.phase is HostPhase.LOST and host.retry_at <= now:
            out.append(cmd.StartAgent(host.spec))
            changed[name] = replace(host, phase=HostPhase.STARTING, since=now)
            wake = min(wake, now + cluster.limits.timeouts.agent)
        elif host.phase is HostPhase.LOST:
            wake = min(wake, host.retry_at)
        elif host.phase is HostPhase.STARTING:
            wake = min(wake, speaks_by(cluster, host))
        elif not host.full and room(name, host) > 0:
            filled, fresh, cooled_at = _fill(host, room(name, host), now)
            wake = min(wake, cooled_at)
            if fresh:
                changed[name] = filled
                started += fresh
    if started:
        wake = min(wake, now + cluster.limits.timeouts.worker)
    if not changed:
        return cluster if cluster.wake_at == wake else replace(cluster, wake_at=wake)
    out.extend(cmd.StartWorker(w) for w in started)
    return replace(
        cluster,
        hosts={**cluster.hosts, **changed},
        workers=cluster.workers | {w: Worker(w, WorkerState.STARTING, since=now) for w in started},
        starting=cluster.starting.union(started),
        wake_at=wake,
    )


def _in_turn(cluster: ClusterState) -> Iterable[tuple[str, Host]]:
    """By seniority; but first the host that keeps the training state, which only a worker there can take."""
    first = keeper(cluster)
    return cluster.hosts.items() if not first else sorted(cluster.hosts.items(), key=lambda item: item[0] != first)


def _lacks_heir(cluster: ClusterState) -> bool:
    """Whether nobody lives on the host that keeps the training state: then a worker is started there, wanted or not."""
    name = keeper(cluster)
    return name in cluster.hosts and all(w in cluster.stopped or w in cluster.failed for w in on_host(cluster, name))


def too_many(asked: int, room: int) -> str:
    """One line for more workers than the driver's machine has open files for."""
    return (
        f"{asked} workers are asked for, and only {room} fit: each needs 6 open files in ipyparallel's controller. "
        "Raise the hard limit of open files here (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in a container), "
        "then start the cluster again."
    )


def tell_of_room(before: ClusterState, cluster: ClusterState, out: Commands) -> None:
    """Say so when more workers are asked for than before, and more than fit."""
    room, asked = cluster.limits.room, _asked(cluster)
    if room is not None and asked > max(room, _asked(before)):
        out.append(cmd.Record("no-room", too_many(asked, room)))


def _asked(cluster: ClusterState) -> int:
    slots = sum(host.spec.slots for host in cluster.hosts.values() if host.phase is not HostPhase.DRAINING)
    return int(min(slots, cluster.limits.asked))


def speaks_by(cluster: ClusterState, host: Host) -> float:
    """When its agent must have spoken."""
    silent = host.phase is HostPhase.STARTING and host.spec.name not in cluster.probing
    return host.since + cluster.limits.timeouts.agent if silent else NEVER


def comes_by(cluster: ClusterState, w: WorkerId) -> float:
    """When its engine must have come; or when it must be out of a generation that it was told to leave as a newcomer."""
    worker, timeouts = cluster.workers[w], cluster.limits.timeouts
    match worker.state:
        case WorkerState.STARTING if not worker.registered:  # what it runs then has deadlines of its own
            return worker.since + timeouts.worker
        case WorkerState.RUNNING:
            return worker.since + timeouts.recover
    return NEVER


def expect(cluster: ClusterState, ids: Collection[WorkerId]) -> ClusterState:
    """These workers are on their way to the elastic loop, each with the deadline of `comes_by`."""
    wake = min((comes_by(cluster, w) for w in ids), default=NEVER)
    return replace(cluster, starting=cluster.starting.union(ids), wake_at=min(cluster.wake_at, wake))


def _fill(host: Host, wanted: float, now: float) -> tuple[Host, list[WorkerId], float]:
    """Take up to `wanted` free slots. Also says when the next cooling one may be tried."""
    slots = list(host.slots)
    started: list[WorkerId] = []
    for index, slot in enumerate(slots[: host.spec.slots]):
        if slot.busy or slot.backoff_until > now or len(started) >= wanted:
            continue
        started.append(WorkerId(host.spec.name, index, slot.incarnation + 1))
        slots[index] = replace(slot, incarnation=slot.incarnation + 1, busy=True, backoff_until=0.0, reason="")
    cooling = [slot for slot in slots[: host.spec.slots] if slot.backoff_until > now]
    reason = cooling[0].reason if cooling else ""
    cooled_at = min((slot.backoff_until for slot in cooling), default=NEVER)
    return replace(_fit(host, tuple(slots)), reason=reason), started, cooled_at


def _staying(cluster: ClusterState) -> int:
    """How many workers are alive and not on their way out."""
    return len(cluster.workers) - len(cluster.stopped) - len(cluster.leaving)


def _shed(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """More workers than wanted: let the youngest go, those without a rank first; then members above max, highest first."""
    limits = cluster.limits
    if limits.max is None:
        return cluster
    if len(cluster.members) - len(cluster.leaving) > limits.max:
        staying = [w for w in cluster.members if w not in cluster.leaving]
        cluster = dismiss(cluster, staying[limits.max :], now, out)
    surplus = _staying(cluster) - int(limits.wanted)
    if surplus <= 0:
        return cluster
    busy = cluster.ranked | cluster.stopped | cluster.failed
    idle = (w for w in reversed(cluster.workers) if w not in busy and w.host != keeper(cluster))
    return stop_workers(cluster, list(islice(idle, surplus)), out)


def missing(cluster: ClusterState, now: float) -> tuple[Missing, ...]:
    """What one waits for, the first of it."""
    found = [_awaited(cluster.workers[w]) for w in nsmallest(MOST, cluster.starting)]
    for name, host in cluster.hosts.items():
        if len(found) >= MOST:
            break
        if host.phase is HostPhase.STARTING:
            found.append(
                Missing("probed", name, host.reason) if name in cluster.probing else Missing("host starting", name)
            )
        elif host.phase is HostPhase.LOST:
            found.append(Missing("lost", name, host.reason, until=host.retry_at))
        elif not host.full:
            found += [
                Missing("backoff", f"{name}/{index}", until=slot.backoff_until)
                for index, slot in enumerate(host.slots[: host.spec.slots])
                if slot.backoff_until > now
            ]
    job = cluster.active.name if cluster.active else ""
    if cluster.linger_until and any(worker.job not in ("", job) for worker in cluster.workers.values()):
        found.append(Missing("programs"))
    found += [Missing("failed", str(w), cluster.workers[w].reason) for w in nsmallest(1, cluster.failed)]
    return tuple(found[:MOST])


def _awaited(worker: Worker) -> Missing:
    if worker.cell:
        return Missing("in a setup cell", str(worker.id), since=worker.cell_since)
    return Missing("starting", str(worker.id), since=worker.since)


def coming(cluster: ClusterState) -> bool:
    """Whether some worker is on its way."""
    return bool(cluster.starting) or any(host.phase is HostPhase.STARTING for host in cluster.hosts.values())


def settled(cluster: ClusterState, now: float) -> bool:
    """Whether ready newcomers, and leavers, have waited long enough for those that are still starting."""
    return now >= cluster.since + cluster.limits.timeouts.settle or not coming(cluster)


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"


def _fit(host: Host, slots: tuple[Slot, ...]) -> Host:
    return replace(host, slots=slots, full=all(slot.busy for slot in slots[: host.spec.slots]))


def _refit(cluster: ClusterState, w: WorkerId, slot: Slot) -> ClusterState:
    host = cluster.hosts[w.host]
    return place(cluster, _fit(host, (*host.slots[: w.slot], slot, *host.slots[w.slot + 1 :])))


def place(cluster: ClusterState, host: Host) -> ClusterState:
    """With `host` in the place of what was known of it."""
    return replace(cluster, hosts={**cluster.hosts, host.spec.name: host})


def _forget(cluster: ClusterState, name: str) -> ClusterState:
    """The host is gone. Should it come back, its workers will be new ones."""
    cluster = _stop_probing(cluster, name)
    hosts = {n: host for n, host in cluster.hosts.items() if n != name}
    left = {n: number for n, number in cluster.incarnations.items() if n != name} | {name: newest(cluster, name)}
    if len(left) > NAMES:
        oldest = next(n for n in left if n != FORGOTTEN)
        left[FORGOTTEN] = max(left.pop(oldest), left.get(FORGOTTEN, 0))
    return replace(cluster, hosts=hosts, incarnations=left)


def newest(cluster: ClusterState, name: str) -> int:
    """The highest incarnation of the host's workers so far, those of slots that it no longer has included."""
    return max([cluster.incarnations.get(name, 0), *(slot.incarnation for slot in cluster.hosts[name].slots)])


def _stop_probing(cluster: ClusterState, name: str) -> ClusterState:
    if name not in cluster.probing:
        return cluster
    return replace(cluster, probing={n: admission for n, admission in cluster.probing.items() if n != name})
