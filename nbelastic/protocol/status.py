"""The structs that `Cluster.status()`, `Cluster.events` and `Cluster.stacks()` return."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct


class RequestStatus(Struct, frozen=True):
    """A request of a dashboard's button. `word`: under way, done or refused; `why`: details. `id`: the dashboard has chosen it."""

    id: str
    by: str
    text: str
    word: str = "under way"
    why: str = ""


class GpuStatus(Struct, frozen=True):
    """A GPU, as NVML reports it. `busy`: percent of the time. `memory`: MB in use, of `memory_total`. `temperature`: °C.

    All are None if NVML cannot read the GPU; `busy` and `temperature` of a slice (MIG) are None too.
    """

    id: str
    busy: int | None = None
    memory: int | None = None
    memory_total: int | None = None
    temperature: int | None = None


class HostStatus(Struct, frozen=True):
    """A host. `phase`: starting, up, backoff, draining, lost. `backoff_until`: seconds from now; 0.0: no back-off.

    `cpu`: percent of all cores together. `memory`: bytes in use, of `memory_total`. All three are None before the first
    sample. `gpus`: those that the agent may use. `slots_in_backoff`: remaining seconds by slot.
    `ends_in`: seconds until a draining host ends; None: it was not announced.
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
    gpus: tuple[GpuStatus, ...] = ()
    slots_in_backoff: dict[int, float] = {}
    ends_in: float | None = None


class WorkerCopies(Struct, frozen=True):
    """Copies of a sharded model on one worker. `memory`: their bytes, those of its own shard included.

    `copied_to`: ids of the workers that keep a copy of its shard. `keeps`: ids of the workers whose copies it keeps.
    `shared`: the other workers of its host can read its copies, also after its end.
    """

    memory: int
    copied_to: tuple[str, ...]
    keeps: tuple[str, ...]
    shared: bool = False


class WorkerStatus(Struct, frozen=True):
    """A worker. `state`: starting, ready, running, succeeded, failed, lost, stopped. Outside a world its ranks are None.

    `step`: commits so far. `behind`: commits that other members have made for a second, and this one has not. `cpu`:
    percent of one core. `memory`: resident bytes. `copies`: with a `ShardedState` only. `gpu`: the id of the only GPU that it
    sees; empty if it was allotted none.
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
    copies: WorkerCopies | None = None
    gpu: str = ""


class CopiesStatus(Struct, frozen=True):
    """Copies of the commits of a sharded model. `commit`: the newest whole one; None: there is none yet.

    `made_at`: when it was made, in seconds since 1970. `seconds`: that copying it took. `memory`: bytes of all copies, which
    are on `workers` workers.
    """

    commit: int | None
    made_at: float
    seconds: float
    memory: int
    workers: int


class CheckpointStatus(Struct, frozen=True):
    """The checkpoints of a job that has some. `commit`: of the newest one; None: there is none yet.

    `made_at`: when it was complete, in seconds since 1970. `size`: its bytes. One is written every `every` commits.
    """

    commit: int | None
    made_at: float
    size: int
    every: int


class DriverFacts(Struct, frozen=True):
    """The driver's process. `since`: when it began, in seconds since 1970. `number`: 1, and one more with each new driver.

    `lease`: seconds for which a kept cluster lives without a client; None: the cluster ends with its kernel. `versions`: of
    Python and of packages, in the driver's environment; hosts with others are refused.
    """

    pid: int
    since: float
    number: int
    lease: float | None
    versions: dict[str, str]


class Status(Struct, frozen=True):
    """The state of a cluster at one moment. `job`: the name of the present or last job; `outcome`: how it ended.

    `report`: the newest values that rank 0 passed to `state.report()`. `curves`: earlier values of its first names, the
    oldest first. `total`: the number of steps, if `report(total=...)` was called. `steps_per_second`: over the last seconds.
    `time`: of this status; `failed_at`: when a worker or host was last lost; both in seconds since 1970.
    `orders`: requests of dashboards' buttons. `copies`: with a `ShardedState` only. `checkpoint`: of jobs with checkpoints.
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
    orders: tuple[RequestStatus, ...] = ()
    copies: CopiesStatus | None = None
    checkpoint: CheckpointStatus | None = None


@dataclass(frozen=True)  # not a msgspec.Struct: pandas makes a table of a list of dataclasses
class EventRecord:
    """One line of the event log. `time`: seconds since 1970. `took`: milliseconds of a change, by phase.

    `size`: members of the world after the event; 0 without a job. `lost`: of the first commit after a loss: how many reported
    commits have to be made again; None: not known.
    """

    time: float
    kind: str
    text: str
    host: str = ""
    worker: str = ""
    generation: int = 0
    took: dict[str, float] = field(default_factory=dict)
    size: int = 0
    lost: int | None = None


JOB_ENDS = ("job-succeeded", "job-failed", "job-stopped")  # kinds of records


class RankStepTimes(Struct, frozen=True):
    """How long a rank's steps took without waiting for others: milliseconds in each span of time, the newest last.

    `times` has None where it did not report. `text`: what is said of it while it is slower than the others.
    """

    worker: str
    rank: int
    times: tuple[float | None, ...]
    text: str = ""


class StepTimes(Struct, frozen=True):
    """The ranks of the world. Each of their times is of `span` seconds; the last span ends at `end`, in seconds since 1970."""

    span: float
    end: float
    ranks: tuple[RankStepTimes, ...]


class WorkerStack(Struct, frozen=True):
    """A worker's stack. `place`: the innermost frame in the user's code, as `train.py:88 in load`.

    `text`: the Python stack of the main thread, the innermost call last; empty if the worker did not answer. `note`: whether
    it is behind the others.
    """

    worker: str
    rank: int | None
    place: str
    text: str
    note: str = ""


EVENTS_IN_MEMORY = 10_000  # records that a driver and a client keep; the event log has all
