"""The status of a cluster, made from its state and from what was heard beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from nbelastic.core.reasons import in_words
from nbelastic.core.state import ClusterState, host_backoff_until
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.ranks import places
from nbelastic.protocol.status import HostStatus, Status, WorkerStatus

STEP = 0.5  # seconds by which the wall clock was set, or the machine was suspended, as opposed to drift


class _Clock:
    """Wall time from monotonic time. Both drift apart by a little, and ends of cooldowns would move from look to look."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self, now: float) -> float:
        """The wall time, in seconds since 1970, at the monotonic time `now`."""
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset) > STEP:
            self._offset = offset
        return now + self._offset


wall = _Clock()


def snapshot(name: str, cluster: ClusterState, live: Telemetry, now: float) -> Status:
    """The status of `cluster` at `now` (seconds, the driver's monotonic clock)."""
    ranks = dict(zip(cluster.members, places(cluster.members), strict=True))
    hosts = []
    for host in cluster.hosts.values():
        until = host_backoff_until(host, now)
        phase = "backoff" if until and host.phase == "up" else str(host.phase)
        sample = live.host_samples.get(host.spec.name)
        cooling = {i: slot.backoff_until - now for i, slot in enumerate(host.slots) if slot.backoff_until > now}
        hosts.append(
            HostStatus(
                host.spec.name,
                host.address,
                host.spec.slots,
                phase,
                host.reason or live.jobs.get(host.spec.name, ""),
                until - now if until else 0.0,
                cpu=sample.cpu if sample else None,
                memory=sample.memory if sample else None,
                memory_total=sample.memory_total if sample else None,
                gpus=sample.gpus if sample else (),
                slots_in_backoff=cooling,
            )
        )
    return Status(
        name=name,
        phase=cluster.phase,
        reason=f"stopped: {cluster.stopping}" if cluster.phase == "finished" else in_words(cluster.reason, now),
        generation=cluster.generation,
        world_size=len(cluster.members) if cluster.phase == "running" else 0,
        min=cluster.limits.min,
        max=cluster.limits.max,
        hosts=tuple(hosts),
        workers=_workers(cluster, live, {w: (p.rank, p.local_rank) for w, p in ranks.items()}, now),
        job=cluster.job.name if cluster.job else None,
        outcome=cluster.job.outcome if cluster.job else "",
        step=live.step,
        report=live.report,
        steps_per_second=live.steps_per_second if cluster.active else None,
        total=live.total,
        curves={name: curve.points for name, curve in live.curves.items() if len(curve.points) > 1},
        time=wall(now),
        failed_at=live.failed_at,
        orders=tuple(live.orders),
    )


def _workers(
    cluster: ClusterState, live: Telemetry, ranks: Mapping[WorkerId, tuple[int, int]], now: float
) -> tuple[WorkerStatus, ...]:
    rows = []
    running = cluster.active is not None and cluster.phase == "running"
    still = cluster.still.behind if cluster.still is not None else {}
    for w, worker in sorted(cluster.workers.items()):
        host = cluster.hosts.get(w.host)
        restarts = host.slots[w.slot].restarts if host and w.slot < len(host.slots) else 0
        rank, local_rank = ranks.get(w, (None, None))
        cpu, memory = live.worker_samples.get(str(w), (None, None))
        behind = live.behind(w, now) if running and rank is not None else 0
        if w in still:  # at the same commit as the others, it may be, but not as far in its step
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
                live.steps.get(w, worker.commit),
                restarts,
                live.log_dir,
                "; ".join(filter(None, (worker.reason, worker.silent or live.blocked_text(w)))),
                cpu,
                memory,
                behind,
            )
        )
    return tuple(rows)
