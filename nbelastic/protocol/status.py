"""What `Cluster.status()` and `Cluster.events` return."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct


class OrderStatus(Struct, frozen=True):
    """An order of a dashboard: `word` is under way, done or refused; `why` says more. `id` is the dashboard's own."""

    id: str
    by: str
    text: str
    word: str = "under way"
    why: str = ""


class HostStatus(Struct, frozen=True):
    """`phase`: starting, up, backoff, draining, lost. `backoff_until`: seconds from now, 0.0 if it is not in back-off.

    `cpu` in percent of all its cores, `memory` in bytes in use on the host, of `memory_total`; None before the first
    sample. `gpus`: of each the utilisation in percent, MB in use and MB there are. `slots_in_backoff`: slots that are
    in back-off, and how many seconds more.
    """

    name: str
    address: str
    slots: int
    phase: str
    reason: str
    backoff_until: float
    cpu: float | None = None
    memory: int | None = None
    memory_total: int | None = None
    gpus: tuple[tuple[int, int, int], ...] = ()
    slots_in_backoff: dict[int, float] = {}


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
    `time`: of this look; `failed_at`: when a worker or host was lost last; both in seconds since the generation of the clock.
    """

    name: str
    phase: str
    reason: str
    generation: int
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
    generation: int = 0
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


KEPT = 10_000  # records in memory; the files have more
