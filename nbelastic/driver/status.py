"""The status of a cluster, made from its state and its telemetry."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from nbelastic.core.host_lifecycle import REPLACES
from nbelastic.core.host_slots import host_backoff_until
from nbelastic.core.reasons import in_words, queued_hosts, with_queued
from nbelastic.core.requests import FAR
from nbelastic.core.state import ClusterState, Host, HostPhase, Worker
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.rank_layout import rank_numbers
from nbelastic.protocol.settings import Settings
from nbelastic.protocol.status import (
    CheckpointStatus,
    CopiesStatus,
    DriverFacts,
    HostStatus,
    Status,
    WorkerCopies,
    WorkerStatus,
)
from nbelastic.provision.slurm_reasons import advice_for
from nbelastic.system import versions

_STATE = re.compile(r"^(\w+) \((.*)\)$")  # queued (Resources)
MAX_DRIFT = 0.5  # seconds; a larger difference means that the wall clock was set or the machine was suspended


class _WallClock:
    """Wall time from monotonic time. It ignores drift, which would move the end of a back-off from status to status."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self, now: float) -> float:
        """The wall time, in seconds since 1970, at the monotonic time `now`."""
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset) > MAX_DRIFT:
            self._offset = offset
        return now + self._offset


wall = _WallClock()


def snapshot(name: str, cluster: ClusterState, telemetry: Telemetry, now: float) -> Status:
    """The status of `cluster` at `now` (seconds, the driver's monotonic clock)."""
    ranks = dict(zip(cluster.members, rank_numbers(cluster.members), strict=True))
    hosts = []
    for host in cluster.hosts.values():
        until = host_backoff_until(host, now)
        phase = "backoff" if until and host.phase == "up" else str(host.phase)
        sample = telemetry.host_samples.get(host.spec.name)
        in_backoff = {i: slot.backoff_until - now for i, slot in enumerate(host.slots) if slot.backoff_until > now}
        hosts.append(
            HostStatus(
                host.spec.name,
                host.address,
                host.spec.slots,
                phase,
                _host_reason(host, telemetry),
                until - now if until else 0.0,
                cpu=sample.cpu if sample else None,
                memory=sample.memory if sample else None,
                memory_total=sample.memory_total if sample else None,
                gpus=sample.gpus if sample else (),
                slots_in_backoff=in_backoff,
                ends_in=_ends_in(cluster, host.spec.name, now),
            )
        )
    return Status(
        name=name,
        phase=cluster.phase,
        reason=_cluster_reason(cluster, telemetry, now),
        generation=cluster.generation,
        world_size=len(cluster.members) if cluster.has_world else 0,
        min=cluster.limits.min,
        max=cluster.limits.max,
        hosts=tuple(hosts),
        workers=_workers(cluster, telemetry, {w: (p.rank, p.local_rank) for w, p in ranks.items()}, now),
        job=cluster.job.name if cluster.job else None,
        outcome=cluster.job.outcome if cluster.job else "",
        step=telemetry.step,
        report=telemetry.report,
        steps_per_second=telemetry.steps_per_second if cluster.active else None,
        total=telemetry.total,
        curves={name: curve.points for name, curve in telemetry.curves.items() if len(curve.points) > 1},
        time=wall(now),
        failed_at=telemetry.failed_at,
        orders=tuple(telemetry.requests),
        copies=_copies(cluster, telemetry),
        checkpoint=_checkpoint(telemetry),
    )


def driver_facts(settings: Settings, term: int) -> DriverFacts:
    """The facts about this process, the cluster's driver number `term`."""
    lease = None if settings.owner else settings.lease
    return DriverFacts(os.getpid(), time.time(), term, lease, versions.installed())


def _breakpoint(worker: Worker) -> str:
    return f"waits at a breakpoint in {worker.breakpoint_at}: %elastic_debug" if worker.breakpoint_at else ""


def _worker_reason(w: WorkerId, worker: Worker, telemetry: Telemetry) -> str:
    unresponsive = worker.unresponsive or telemetry.blocked_text(w)
    texts = (_breakpoint(worker), worker.reason, unresponsive, telemetry.differs_text(w), telemetry.slow_ranks.text(w))
    return "; ".join(text for text in texts if text)


def _cluster_reason(cluster: ClusterState, telemetry: Telemetry, now: float) -> str:
    """Why the next thing has not happened yet. For batch jobs in it, what a person must do if they can never start."""
    if cluster.phase == "finished":
        return f"stopped: {cluster.stopping}"
    queued = {
        name: state
        for name, state in telemetry.batch_jobs.items()
        if state and name in cluster.hosts and cluster.hosts[name].phase is HostPhase.STARTING
    }
    reason = with_queued(cluster.reason, {name: _STATE.sub(r"\1: \2", state) for name, state in queued.items()})
    advice = dict.fromkeys(advice_for(queued[name]) for name in queued_hosts(reason))
    return "; ".join([in_words(reason, now), *filter(None, advice)])


def _ends_in(cluster: ClusterState, host: str, now: float) -> float | None:
    seconds = cluster.ending[host].at - now if host in cluster.ending else FAR
    return max(0.0, seconds) if seconds < FAR else None


def _host_reason(host: Host, telemetry: Telemetry) -> str:
    state = telemetry.batch_jobs.get(host.spec.name, "")
    if state and host.phase is HostPhase.STARTING:  # an earlier failure must not hide what its next job waits for
        advice = advice_for(state)
        before = host.reason if host.reason.startswith(REPLACES) or not host.failures else f"before: {host.reason}"
        return "; ".join(filter(None, (f"{state}: {advice}" if advice else state, before)))
    sample = telemetry.host_samples.get(host.spec.name)
    slower = f"slower than it could be: {'; '.join(sample.throttled)}" if sample and sample.throttled else ""
    return host.reason or slower


def _workers(
    cluster: ClusterState, telemetry: Telemetry, ranks: Mapping[WorkerId, tuple[int, int]], now: float
) -> tuple[WorkerStatus, ...]:
    rows = []
    running = cluster.active is not None and cluster.has_world
    stragglers = cluster.stall.stragglers if cluster.stall is not None else {}
    for w, worker in sorted(cluster.workers.items()):
        host = cluster.hosts.get(w.host)
        restarts = host.slots[w.slot].restarts if host and w.slot < len(host.slots) else 0
        rank, local_rank = ranks.get(w, (None, None))
        cpu, memory = telemetry.worker_samples.get(str(w), (None, None))
        behind = telemetry.behind(w, now) if running and rank is not None else 0
        if w in stragglers:  # it may be at the same commit as the others, but is not as far in its step
            behind = max(1, behind)
        rows.append(
            WorkerStatus(
                str(w),
                w.host,
                w.slot,
                rank,
                local_rank,
                worker.pid,
                str(worker.state),
                telemetry.steps.get(w, worker.commit),
                restarts,
                telemetry.log_dir,
                _worker_reason(w, worker, telemetry),
                cpu,
                memory,
                behind,
                _worker_copies(w, cluster, telemetry) if running and rank is not None else None,
                worker.gpu,
            )
        )
    return tuple(rows)


def _copies(cluster: ClusterState, telemetry: Telemetry) -> CopiesStatus | None:
    """Copies of the present job; None if it has none."""
    whole, rows = telemetry.whole, []
    if cluster.active is not None and cluster.has_world:
        rows = [_worker_copies(w, cluster, telemetry) for w in cluster.members]
    memory = [row.memory for row in rows if row is not None and row.memory]
    if cluster.active is None or (whole is None and not memory):
        return None
    if whole is None:
        return CopiesStatus(None, 0.0, 0.0, sum(memory), len(memory))
    return CopiesStatus(whole.commit, wall(whole.made_at), whole.seconds, sum(memory), len(memory))


def _checkpoint(telemetry: Telemetry) -> CheckpointStatus | None:
    newest = telemetry.checkpoint
    if newest is None:
        return None
    return CheckpointStatus(newest.commit, wall(newest.made_at), newest.size, newest.every)


def _worker_copies(w: WorkerId, cluster: ClusterState, telemetry: Telemetry) -> WorkerCopies | None:
    """Copies on a member, with ranks as ids. A report of an earlier generation is not used: it names other ranks."""
    generation, copies = telemetry.copies.get(w, (0, None))
    if copies is None or generation != cluster.generation:
        return None

    def names(ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(cluster.members[rank]) for rank in ranks if 0 <= rank < len(cluster.members))

    return WorkerCopies(copies.nbytes, names(copies.buddies), names(copies.wards), copies.shared)
