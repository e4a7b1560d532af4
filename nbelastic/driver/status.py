"""The frozen snapshot that `Cluster.status()` returns, and the records of `Cluster.events`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from nbelastic.core.messages import WorkerId
from nbelastic.core.placement import places
from nbelastic.core.reasons import in_words
from nbelastic.core.world import World, host_cooling_until
from nbelastic.driver.live import Live, OrderStatus

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


class HostStatus(Struct, frozen=True):
    """`phase`: starting, up, cooling, draining, lost. `cooling_until`: seconds from now, 0.0 if it is not cooling.

    `cpu` in percent of all its cores, `memory` in bytes in use on the host, of `memory_total`; None before the first
    sample. `gpus`: of each the utilisation in percent, MB in use and MB there are. `slots_cooling`: slots that are
    cooling, and how many seconds more.
    """

    name: str
    address: str
    slots: int
    phase: str
    reason: str
    cooling_until: float
    cpu: float | None = None
    memory: int | None = None
    memory_total: int | None = None
    gpus: tuple[tuple[int, int, int], ...] = ()
    slots_cooling: dict[int, float] = {}


class WorkerStatus(Struct, frozen=True):
    """`state`: starting, ready, running, succeeded, failed, lost, stopped. `rank` and `local_rank` are None outside a world.

    `step` is the number of commits so far, `behind` how many others have made for a second and this one has not; `cpu` in
    percent of one core, `memory` resident bytes.
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
    behind: int = 0


class Status(Struct, frozen=True):
    """All that can be seen of a cluster at one moment. `job` is the current or last job's name, `outcome` how it ended.

    `report` holds what rank 0 last gave to `state.report()`, `curves` how its first values went, oldest first, and `total`
    how many steps there will be, if `report(total=...)` has said so; `steps_per_second` is measured over the last seconds.
    `time`: of this look; `failed_at`: when a worker or host was lost last; both in seconds since the epoch of the clock.
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
    report: dict[str, float | str] = {}
    steps_per_second: float | None = None
    total: int | None = None
    curves: dict[str, tuple[float, ...]] = {}
    time: float = 0.0
    failed_at: float | None = None
    orders: tuple[OrderStatus, ...] = ()


@dataclass(frozen=True)  # and no msgspec.Struct: pandas makes a table of a list of these
class EventRecord:
    """One line of the event log. `time` in seconds since 1970; `took`: milliseconds of each phase of a change.

    `size`: how many members the world has after it; 0 without a job.
    """

    time: float
    kind: str
    text: str
    host: str = ""
    worker: str = ""
    epoch: int = 0
    took: dict[str, float] = field(default_factory=dict)
    size: int = 0


class WorkerStack(Struct, frozen=True):
    """`place` is its innermost frame in the user's code, as `train.py:88 in load`; `text` the Python stack of its main
    thread, innermost call last, empty if it did not answer; `note` says if it is behind the others.
    """

    worker: str
    rank: int | None
    place: str
    text: str
    note: str = ""


def snapshot(name: str, world: World, live: Live, now: float) -> Status:
    """The status of `world` at `now` (seconds, the driver's monotonic clock)."""
    ranks = dict(zip(world.members, places(world.members), strict=True))
    hosts = []
    for host in world.hosts.values():
        until = host_cooling_until(host, now)
        phase = "cooling" if until and host.phase == "up" else str(host.phase)
        sample = live.host_samples.get(host.spec.name)
        cooling = {i: slot.cooling_until - now for i, slot in enumerate(host.slots) if slot.cooling_until > now}
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
                slots_cooling=cooling,
            )
        )
    return Status(
        name=name,
        phase=world.phase,
        reason=f"stopped: {world.stopping}" if world.phase == "finished" else in_words(world.reason, now),
        epoch=world.epoch,
        world_size=len(world.members) if world.phase == "running" else 0,
        min=world.limits.min,
        max=world.limits.max,
        hosts=tuple(hosts),
        workers=_workers(world, live, {w: (p.rank, p.local_rank) for w, p in ranks.items()}, now),
        job=world.job.name if world.job else None,
        outcome=world.job.outcome if world.job else "",
        step=live.step,
        report=live.report,
        steps_per_second=live.steps_per_second if world.active else None,
        total=live.total,
        curves={name: curve.points for name, curve in live.curves.items() if len(curve.points) > 1},
        time=wall(now),
        failed_at=live.failed_at,
        orders=tuple(live.orders),
    )


def _workers(
    world: World, live: Live, ranks: Mapping[WorkerId, tuple[int, int]], now: float
) -> tuple[WorkerStatus, ...]:
    rows = []
    running = world.active is not None and world.phase == "running"
    still = world.still.behind if world.still is not None else {}
    for w, worker in sorted(world.workers.items()):
        host = world.hosts.get(w.host)
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
