"""What a driver saves of the cluster state, as agents and workers cannot report it to the next driver."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import host_lifecycle
from nbelastic.core.state import ClusterState, Ending, HostPhase, Job, KeptState, SetupCell, Slot, Stage
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec, WorkerId


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
    lost_for: str | None = None

    def slot(self, number: int, **now: object) -> Slot:
        """The saved record of a slot, with the present values `now`."""
        return replace(self.slots[number] if number < len(self.slots) else Slot(), **now)


class SavedCluster(Struct, frozen=True):
    """The part of `ClusterState` that the next driver needs, with the same names. `job` to `ranks` are those of `Job`."""

    limits: Limits
    hosts: tuple[SavedHost, ...]
    ending: dict[str, Ending]
    removed_hosts: tuple[str, ...]
    incarnations: dict[str, int]
    hosts_joined: int
    highest_generation: int
    last_probe: int
    members: tuple[WorkerId, ...]
    stopped: tuple[WorkerId, ...]
    gathering: bool  # the last break was counted
    stopping: str
    job: str
    outcome: str
    reason: str
    backend: str
    formed: bool
    program: int
    kept_state: KeptState | None
    last_formed: int
    ranks: tuple[WorkerId, ...]
    setup: tuple[SetupCell, ...]
    ran: tuple[tuple[WorkerId, tuple[int, ...]], ...]  # versions of setup cells, of registered workers
    resets: int
    driver_address: str
    external_address: str
    paused_by: str = ""
    ending_nodes: dict[str, float] = {}
    at_once: int = 0  # of `Job`


Saved = tuple[ClusterState, SavedCluster]  # a state, and what was saved of it
# Fields of `ClusterState` from which all but `ran` is saved.
_SAVED = (
    *("limits", "hosts", "ending", "removed_hosts", "incarnations", "hosts_joined", "highest_generation", "last_probe"),
    *("members", "stopped", "stage", "stopping", "job", "kept_state", "last_formed", "setup", "resets"),
    *("driver_address", "external_address", "halt", "ending_nodes"),
)


def is_saved(before: ClusterState, cluster: ClusterState) -> bool:
    """Whether a snapshot of `before` has all of this state that is saved, if no worker has run a setup cell since. O(1)"""
    return all(getattr(before, field) is getattr(cluster, field) for field in _SAVED)


def snapshot_of(cluster: ClusterState, earlier: Saved | None = None) -> SavedCluster:
    """The part of this state that the next driver needs. Parts that are the same as in `earlier` are used again."""
    job = cluster.job or Job("")
    return SavedCluster(
        limits=cluster.limits,
        hosts=_hosts(cluster, earlier),
        ending=cluster.ending,
        removed_hosts=tuple(sorted(cluster.removed_hosts)),
        incarnations=cluster.incarnations,
        hosts_joined=cluster.hosts_joined,
        highest_generation=cluster.highest_generation,
        last_probe=cluster.last_probe,
        members=cluster.members,
        stopped=tuple(sorted(cluster.stopped)),
        gathering=cluster.stage is Stage.GATHERING,
        stopping=cluster.stopping,
        job=job.name,
        outcome=job.outcome,
        reason=job.reason,
        backend=job.backend,
        formed=job.formed,
        program=job.program,
        kept_state=replace(cluster.kept_state, reader=None) if cluster.kept_state is not None else None,
        last_formed=cluster.last_formed,
        ranks=job.ranks,
        setup=cluster.setup,
        ran=_ran(cluster, earlier),
        resets=cluster.resets,
        driver_address=cluster.driver_address,
        external_address=cluster.external_address,
        paused_by=cluster.halt.paused_by,
        ending_nodes=cluster.ending_nodes,
        at_once=job.at_once,
    )


def _hosts(cluster: ClusterState, earlier: Saved | None) -> tuple[SavedHost, ...]:
    known: dict[str, SavedHost] = {}
    if earlier is not None and earlier[0].incarnations is cluster.incarnations:
        if earlier[0].hosts is cluster.hosts:
            return earlier[1].hosts
        pairs = zip(earlier[0].hosts.items(), earlier[1].hosts, strict=True)
        known = {name: saved for (name, host), saved in pairs if cluster.hosts.get(name) is host}
    return tuple(known.get(name) or _host(cluster, name) for name in cluster.hosts)


def _host(cluster: ClusterState, name: str) -> SavedHost:
    host, newest = cluster.hosts[name], host_lifecycle.highest_incarnation(cluster, name)
    return SavedHost(
        host.spec,
        host.joined,
        host.by_hand,
        newest,
        host.phase,
        host.slots,
        host.failures,
        host.retry_at,
        host.reason,
        host.lost_for,
    )


def _ran(cluster: ClusterState, earlier: Saved | None) -> tuple[tuple[WorkerId, tuple[int, ...]], ...]:
    if earlier is not None and earlier[0].workers is cluster.workers:
        return earlier[1].ran
    return tuple((w, _in_order(worker.ran)) for w, worker in cluster.workers.items() if worker.registered)


@lru_cache
def _in_order(versions: frozenset[int]) -> tuple[int, ...]:
    """Nearly all workers have run the same setup cells."""
    return tuple(sorted(versions))
