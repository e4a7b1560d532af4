"""The frozen snapshot that `Cluster.status()` returns, and the records of `Cluster.events`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nbelastic.core.messages import WorkerId
from nbelastic.core.placement import places
from nbelastic.core.world import World, host_cooling_until


class HostStatus(Struct, frozen=True):
    """`phase`: starting, up, cooling, draining, lost. `cooling_until`: seconds from now, 0.0 if it is not cooling.

    `cpu` in percent of one core, `memory` in bytes in use on the host; None before the first sample.
    """

    name: str
    address: str
    slots: int
    phase: str
    reason: str
    cooling_until: float
    cpu: float | None = None
    memory: int | None = None


class WorkerStatus(Struct, frozen=True):
    """`state`: starting, ready, running, succeeded, failed, lost, stopped. `rank` and `local_rank` are None outside a world.

    `step` is the number of commits so far; `cpu` in percent of one core, `memory` resident bytes.
    """

    id: str
    host: str
    slot: int
    rank: int | None
    local_rank: int | None
    pid: int
    state: str
    step: int
    restarts: int
    log_dir: str
    reason: str = ""
    cpu: float | None = None
    memory: int | None = None


class Status(Struct, frozen=True):
    """All that can be seen of a cluster at one moment. `job` is the current or last job's name, `outcome` how it ended.

    `report` holds what rank 0 last gave to `state.report()`; `steps_per_second` is measured over the last seconds.
    """

    name: str
    phase: str
    reason: str
    epoch: int
    world_size: int
    min: int
    max: int | None
    hosts: tuple[HostStatus, ...]
    workers: tuple[WorkerStatus, ...]
    job: str | None
    outcome: str
    step: int = 0
    report: dict[str, float] = {}
    steps_per_second: float | None = None


class EventRecord(Struct, frozen=True):
    """One line of the event log. `time` in seconds since the epoch; `took`: milliseconds of each phase of a change."""

    time: float
    kind: str
    text: str
    host: str = ""
    worker: str = ""
    epoch: int = 0
    took: dict[str, float] = {}


class Live(Struct):
    """What the driver has heard beside the world: samples and progress."""

    host_samples: dict[str, tuple[float, int]] = {}
    worker_samples: dict[str, tuple[float, int]] = {}
    steps: dict[WorkerId, int] = {}
    step: int = 0  # the newest commit of the present or last job
    report: dict[str, float] = {}
    steps_per_second: float | None = None
    log_dir: str = ""
    jobs: dict[str, str] = {}  # how the batch jobs stand whose agents have not spoken yet, by host


def snapshot(name: str, world: World, live: Live, now: float) -> Status:
    """The status of `world` at `now` (seconds, the driver's monotonic clock)."""
    ranks = dict(zip(world.members, places(world.members), strict=True))
    hosts = []
    for host in world.hosts.values():
        until = host_cooling_until(host, now)
        phase = "cooling" if until and host.phase == "up" else str(host.phase)
        cpu, memory = live.host_samples.get(host.spec.name, (None, None))
        hosts.append(
            HostStatus(
                host.spec.name,
                host.address,
                host.spec.slots,
                phase,
                host.reason or live.jobs.get(host.spec.name, ""),
                until - now if until else 0.0,
                cpu,
                memory,
            )
        )
    return Status(
        name=name,
        phase=world.phase,
        reason=f"stopped: {world.stopping}" if world.phase == "finished" else world.reason,
        epoch=world.epoch,
        world_size=len(world.members) if world.phase == "running" else 0,
        min=world.limits.min,
        max=world.limits.max,
        hosts=tuple(hosts),
        workers=_workers(world, live, {w: (p.rank, p.local_rank) for w, p in ranks.items()}),
        job=world.job.name if world.job else None,
        outcome=world.job.outcome if world.job else "",
        step=live.step,
        report=live.report,
        steps_per_second=live.steps_per_second if world.active else None,
    )


def _workers(world: World, live: Live, ranks: Mapping[WorkerId, tuple[int, int]]) -> tuple[WorkerStatus, ...]:
    rows = []
    for w, worker in sorted(world.workers.items()):
        host = world.hosts.get(w.host)
        restarts = host.slots[w.slot].restarts if host and w.slot < len(host.slots) else 0
        rank, local_rank = ranks.get(w, (None, None))
        cpu, memory = live.worker_samples.get(str(w), (None, None))
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
                worker.reason,
                cpu,
                memory,
            )
        )
    return tuple(rows)
