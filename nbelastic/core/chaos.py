"""Which worker or host the next injected fault hits. No fault of the core's: it only chooses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from nbelastic.core.host_slots import workers_on
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.core.state_holders import state_lives
from nbelastic.protocol.chaos import FaultKind, draw
from nbelastic.protocol.ids import WorkerId


class Fault(Struct, frozen=True):
    """An injected fault. `worker`: None if it hits the whole host."""

    kind: FaultKind
    host: str
    worker: WorkerId | None = None


class Withheld(Struct, frozen=True):
    """Why no fault can be injected now."""

    why: str


def choose(
    cluster: ClusterState,
    kinds: Sequence[FaultKind],
    seed: int,
    number: int,
    hit: Collection[WorkerId],
    *,
    below_min: bool,
) -> Fault | Withheld:
    """Fault `number`: its kind and its victim are drawn from those that are possible.

    `hit`: workers that an earlier fault has hit and that are not known to be lost yet. Without `below_min` enough workers for
    `min` stay. A worker that holds the training state always stays.
    """
    inside = [w for w in _inside(cluster) if w not in hit]
    if not inside:
        return Withheld("no worker is in a world")
    alive = [*inside, *(w for w in cluster.newcomers if w not in hit)]
    why = ""
    for kind in sorted(kinds, key=lambda kind: draw(seed, number, kind)):
        victims = sorted(_victims(cluster, kind, inside), key=lambda victim: (victim.host, str(victim.worker)))
        refusals = [_refusal(cluster, victim, alive, hit, below_min=below_min) for victim in victims]
        possible = [victim for victim, refusal in zip(victims, refusals, strict=True) if not refusal]
        if possible:
            return possible[int(draw(seed, number, "victim") * len(possible))]
        why = why or next(iter(refusals), f"no victim for {kind}")
    return Withheld(why)


def _inside(cluster: ClusterState) -> list[WorkerId]:
    """The members; before the first world all workers that run the program, and of a script all workers of its hosts."""
    job = cluster.active
    if job is None:  # a script: its nodes run its workers
        ids = [w for w, worker in cluster.workers.items() if worker.state is WorkerState.READY]
    elif not job.formed:
        ids = [w for w, worker in cluster.workers.items() if worker.job == job.name and w not in cluster.newcomers]
    else:
        ids = list(cluster.members)
    return [w for w in ids if w not in cluster.stopped and w not in cluster.hung]


def _victims(cluster: ClusterState, kind: FaultKind, inside: list[WorkerId]) -> list[Fault]:
    reached = [w for w in inside if w.host not in cluster.disconnected]
    if kind == "host":
        hosts = {w.host for w in reached}
        return [Fault(kind, host) for host in hosts if cluster.hosts[host].phase is HostPhase.UP]
    return [Fault(kind, w.host, w) for w in reached] if cluster.active is not None else []


def _refusal(
    cluster: ClusterState, fault: Fault, alive: list[WorkerId], hit: Collection[WorkerId], *, below_min: bool
) -> str:
    """Why this fault must not be injected; empty: it may be."""
    gone = frozenset((fault.worker,) if fault.worker is not None else workers_on(cluster, fault.host)).union(hit)
    left = sum(w not in gone for w in alive)
    if left < cluster.limits.min and not below_min:
        name = fault.worker if fault.worker is not None else f"the host {fault.host}"
        return f"without {name} {left} workers would be left, and min is {cluster.limits.min}"
    if not state_lives(cluster, gone):
        return "the training state would be lost"
    return ""
