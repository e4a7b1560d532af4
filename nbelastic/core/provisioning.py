"""Start and stop agents and workers until there are as many as wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from msgspec.structs import replace

from nbelastic.core import arrivals, gpus
from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_slots, workers_on
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import ClusterState, Host, HostPhase, Worker, WorkerState, without
from nbelastic.core.state_holders import keeper
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.ids import WorkerId


def drain_workers(cluster: ClusterState, workers: Iterable[WorkerId], now: float, out: Commands) -> ClusterState:
    """Let members leave with the next reconfiguration, and stop the other workers at once.

    Programs of an ended job may still write a last checkpoint. Their workers are stopped when they have ended.
    """
    chosen = PersistentSet(w for w in workers if not _lingers(cluster, w))
    members = chosen & cluster.member_set
    if members - cluster.leaving and not cluster.newcomers:
        cluster = replace(cluster, settling_since=now)
    cluster = replace(cluster, leaving=cluster.leaving | members)
    return stop_workers(cluster, sorted(chosen - members), out)


def _lingers(cluster: ClusterState, w: WorkerId) -> bool:
    """Whether the worker's job has ended, but not its program."""
    present = cluster.active.name if cluster.active is not None else ""
    return bool(cluster.linger_until) and cluster.workers[w].job not in ("", present)


def stop_workers(cluster: ClusterState, ids: Iterable[WorkerId], out: Commands, *, kill: bool = False) -> ClusterState:
    """Ask workers that are not members to end. Their ends are not failures."""
    workers = cluster.workers
    chosen = [w for w in ids if w in workers and (kill or w not in cluster.stopped)]
    if not chosen:
        return cluster
    workers = workers | {w: replace(workers[w], state=WorkerState.STOPPED) for w in chosen}
    out.extend(cmd.StopWorker(w, kill=kill) for w in chosen)
    cluster = without(cluster, chosen, "newcomers", "starting", "unregistered", "failed")
    return replace(cluster, workers=workers, stopped=cluster.stopped | chosen)


def provision(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Start agents and workers up to the number that is wanted and allowed, and stop surplus ones. O(hosts)"""
    if cluster.stopping:
        return cluster
    cluster = scale_down(cluster, now, out)
    wanted = _lacking(cluster)
    needs_reader = keeper(cluster) if _needs_kept_state_reader(cluster) else None
    changed: dict[str, Host] = {}
    started: dict[WorkerId, str] = {}  # with their GPUs
    free: gpus.FreeGpus | None = None

    def room(name: str, host: Host) -> float:
        """How many may be started there: none while it receives no orders."""
        if name in cluster.disconnected:
            return 0
        if name == needs_reader and host.is_up:
            return max(1, wanted - len(started))
        return wanted - len(started) if host.phase is HostPhase.UP else 0

    wake = cluster.wake_at  # it may come too early: the worker that had this deadline may have started
    if wake <= now:
        wake = min((arrivals.worker_deadline(cluster, w) for w in cluster.starting), default=NEVER)
    for name, host in _by_seniority(cluster):
        if host.phase is HostPhase.LOST and host.retry_at <= now:
            out.append(cmd.StartAgent(host.spec))
            changed[name] = replace(host, phase=HostPhase.STARTING, since=now, prepares_by=0.0)
            wake = min(wake, now + cluster.limits.timeouts.agent)
        elif host.phase is HostPhase.LOST:
            wake = min(wake, host.retry_at)
        elif host.phase is HostPhase.STARTING:
            wake = min(wake, arrivals.agent_deadline(cluster, host))
        elif not host.full and room(name, host) > 0:
            free = free or gpus.FreeGpus(cluster)
            filled, fresh, backoff_ends = _fill(cluster, host, room(name, host), free, now)
            wake = min(wake, backoff_ends)
            if fresh or filled.reason != host.reason:
                changed[name] = filled
                started |= fresh
    if started:
        wake = min(wake, now + cluster.limits.timeouts.worker)
    if not changed:
        return cluster if cluster.wake_at == wake else replace(cluster, wake_at=wake)
    out.extend(cmd.StartWorker(w, gpu) for w, gpu in started.items())
    return replace(
        cluster,
        hosts={**cluster.hosts, **changed},
        workers=cluster.workers
        | {w: Worker(w, WorkerState.STARTING, since=now, gpu=gpu) for w, gpu in started.items()},
        starting=cluster.starting | started,
        unregistered=cluster.unregistered | started,
        wake_at=wake,
    )


def _by_seniority(cluster: ClusterState) -> Iterable[tuple[str, Host]]:
    """Hosts by seniority, but first the one that keeps the training state: only a worker there can read it."""
    first = keeper(cluster)
    return cluster.hosts.items() if not first else sorted(cluster.hosts.items(), key=lambda item: item[0] != first)


def _needs_kept_state_reader(cluster: ClusterState) -> bool:
    """Whether the host that keeps the training state needs a worker to read it, even beyond `max`."""
    name = keeper(cluster)
    return name in cluster.hosts and all(w in cluster.stopped or w in cluster.failed for w in workers_on(cluster, name))


def expect_workers(cluster: ClusterState, ids: Collection[WorkerId]) -> ClusterState:
    """Count these workers as starting, each with its `worker_deadline`."""
    wake = min((arrivals.worker_deadline(cluster, w) for w in ids), default=NEVER)
    return replace(cluster, starting=cluster.starting | ids, wake_at=min(cluster.wake_at, wake))


def _fill(
    cluster: ClusterState, host: Host, wanted: float, free: gpus.FreeGpus, now: float
) -> tuple[Host, dict[WorkerId, str], float]:
    """Start up to `wanted` workers in the host's free slots. The last value is when the next back-off ends."""
    slots, no_gpu = list(host.slots), False
    started: dict[WorkerId, str] = {}
    for index, slot in enumerate(slots[: host.spec.slots]):
        if slot.busy or slot.backoff_until > now or len(started) >= wanted:
            continue
        gpu = free.take(host)
        if gpu is None:
            no_gpu = True
            break
        started[WorkerId(host.spec.name, index, slot.incarnation + 1)] = gpu
        slots[index] = replace(slot, incarnation=slot.incarnation + 1, busy=True, backoff_until=0.0)
    in_backoff = [slot for slot in slots[: host.spec.slots] if slot.backoff_until > now]
    without_gpu = gpus.why_no_worker(cluster, host) if no_gpu else gpus.problems(host)
    reason = in_backoff[0].reason if in_backoff else without_gpu
    backoff_ends = min((slot.backoff_until for slot in in_backoff), default=NEVER)
    return replace(with_slots(host, tuple(slots)), reason=reason), started, backoff_ends


def _lacking(cluster: ClusterState) -> float:
    """How many workers more are wanted, and fit; less than 0: there are too many.

    A failed worker, which stays for inspection, has a place among those that fit. Another one is started in its stead.
    """
    limits, staying = cluster.limits, len(cluster.workers) - len(cluster.stopped) - len(cluster.leaving)
    room = NEVER if limits.room is None else limits.room
    return min(limits.asked - (staying - len(cluster.failed)), room - staying)


def keep_leavers(cluster: ClusterState) -> ClusterState:
    """Let members stay that had to leave only as they were above an earlier max. `scale_down` chooses anew."""
    hosts = cluster.hosts
    stay = [
        w
        for w in cluster.leaving
        if hosts[w.host].phase is not HostPhase.DRAINING and w.slot < hosts[w.host].spec.slots
    ]
    return without(cluster, stay, "leaving")


def scale_down(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Stop surplus workers: the youngest without a rank first, then members above max, from the highest rank.

    Those whose programs of an ended job may still write a last checkpoint are stopped when these have ended.
    """
    limits = cluster.limits
    if limits.max is None:
        return cluster
    if len(cluster.members) - len(cluster.leaving) > limits.max:
        staying = [w for w in cluster.members if w not in cluster.leaving]
        cluster = drain_workers(cluster, staying[limits.max :], now, out)
    surplus = -int(_lacking(cluster))
    if surplus <= 0:
        return cluster
    busy = cluster.member_set | cluster.stopped | cluster.failed
    idle = (w for w in reversed(cluster.workers) if w not in busy and w.host != keeper(cluster))
    return stop_workers(cluster, [w for w in islice(idle, surplus) if not _lingers(cluster, w)], out)


MORE_FILES = (
    "Raise the hard limit of open files here (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in a container), "
    "then start the cluster again."
)


def too_many_text(asked: int, room: int) -> str:
    """The error for more workers than the driver's machine has open files for."""
    return (
        f"{asked} workers are asked for, and only {room} fit: the driver may open too few files for more. {MORE_FILES}"
    )


def record_shortage(before: ClusterState, cluster: ClusterState, out: Commands) -> None:
    """Record that more workers are wanted than before, and than the machine has open files for."""
    room, asked = cluster.limits.room, _asked(cluster)
    if room is not None and asked > max(room, _asked(before)):
        out.append(cmd.Record("no-room", too_many_text(asked, room)))


def _asked(cluster: ClusterState) -> int:
    slots = sum(host.spec.slots for host in cluster.hosts.values() if host.phase is not HostPhase.DRAINING)
    return int(min(slots, cluster.limits.asked))
