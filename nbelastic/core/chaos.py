"""Which worker or host the next injected fault hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec import Struct

from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.core.state_holders import holders, state_lives
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
    alive = Counter(w.host for w in (*inside, *(w for w in cluster.newcomers if w not in hit)))
    holding = [] if state_lives(cluster, cluster.workers) else [w for w in holders(cluster) if w not in hit]
    why = ""
    for kind in sorted(kinds, key=lambda kind: draw(seed, number, kind)):
        victims = sorted(_victims(cluster, kind, inside), key=lambda victim: (victim.host, str(victim.worker)))
        first = int(draw(seed, number, "victim") * len(victims))
        for victim in (*victims[first:], *victims[:first]):
            left = alive.total() - (1 if victim.worker is not None else alive[victim.host])
            if left < cluster.limits.min and not below_min:
                name = victim.worker if victim.worker is not None else f"the host {victim.host}"
                why = why or f"without {name} {left} workers would be left, and min is {cluster.limits.min}"
            elif holding and all(_hits(victim, w) for w in holding):
                why = why or "the training state would be lost"
            else:
                return victim
        why = why or f"no victim for {kind}"
    return Withheld(why)


def _hits(fault: Fault, w: WorkerId) -> bool:
    return w == fault.worker if fault.worker is not None else w.host == fault.host


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
