"""What a driver saves of the cluster state, as agents and workers cannot report it to the next driver."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import host_lifecycle
from nbelastic.core.state import ClusterState, HostPhase, Job, KeptState, SetupCell, Slot, Stage
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.limits import Limits


class SavedHost(Struct, frozen=True, omit_defaults=True):
    """`newest`: the highest incarnation of its workers so far. Times are of this machine's monotonic clock."""

    spec: HostSpec
    joined: int
    by_hand: bool
    newest: int
    phase: HostPhase
    slots: tuple[Slot, ...] = ()
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def slot(self, number: int, **now: object) -> Slot:
        """The saved record of a slot, with the present values `now`."""
        return replace(self.slots[number] if number < len(self.slots) else Slot(), **now)


class SavedCluster(Struct, frozen=True):
    """The part of `ClusterState` that the next driver needs. `gathering`: the last break was counted."""

    limits: Limits
    hosts: tuple[SavedHost, ...]
    removed: tuple[str, ...]
    incarnations: dict[str, int]
    joined: int
    numbered: int
    probes: int
    members: tuple[WorkerId, ...]
    stopped: tuple[WorkerId, ...]
    gathering: bool
    stopping: str
    job: str
    outcome: str
    reason: str
    formed: bool
    kept: KeptState | None
    formed_in: int
    ranks: tuple[WorkerId, ...]
    setup: tuple[SetupCell, ...]
    ran: tuple[tuple[WorkerId, tuple[int, ...]], ...]  # versions of setup cells, of registered workers
    resets: int
    here: str
    door: str


def snapshot_of(cluster: ClusterState) -> SavedCluster:
    """The part of this state that the next driver needs."""
    hosts = tuple(
        SavedHost(
            host.spec,
            host.joined,
            host.by_hand,
            host_lifecycle.highest_incarnation(cluster, name),
            host.phase,
            host.slots,
            host.failures,
            host.retry_at,
            host.reason,
        )
        for name, host in cluster.hosts.items()
    )
    job = cluster.job or Job("")
    return SavedCluster(
        limits=cluster.limits,
        hosts=hosts,
        removed=tuple(sorted(cluster.removed_hosts)),
        incarnations=cluster.incarnations,
        joined=cluster.hosts_joined,
        numbered=cluster.highest_generation,
        probes=cluster.last_probe,
        members=cluster.members,
        stopped=tuple(sorted(cluster.stopped)),
        gathering=cluster.stage is Stage.GATHERING,
        stopping=cluster.stopping,
        job=job.name,
        outcome=job.outcome,
        reason=job.reason,
        formed=job.formed,
        kept=replace(cluster.kept_state, reader=None) if cluster.kept_state is not None else None,
        formed_in=cluster.last_formed,
        ranks=job.ranks,
        setup=cluster.setup,
        ran=tuple((w, tuple(sorted(worker.ran))) for w, worker in cluster.workers.items() if worker.registered),
        resets=cluster.resets,
        here=cluster.driver_address,
        door=cluster.external_address,
    )
