"""What a dashboard's views show: the widget's two traits `state` and `change`, as plain JSON.

`python widgets/write_contract.py` writes these types as TypeScript to `widgets/src/contract.d.ts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NotRequired, TypedDict


class WorkerRow(NamedTuple):
    """One worker. `behind`: commits that others have made and it has not. `cpu`: percent of one core. `memory`: MB.

    `gpu`: which of its host's `gpus` is its own, counted from 0.
    """

    rank: int | None
    state: str
    behind: int
    restarts: int
    pid: int
    cpu: int | None
    memory: int | None
    reason: str
    gpu: int | None


class Gpu(NamedTuple):
    """One GPU. `busy`: percent of the time. `memory`: GB in use, of `memory_total`. `temperature`: °C. None: not known."""

    busy: int | None
    memory: float | None
    memory_total: float | None
    temperature: int | None


class WorkerCopies(NamedTuple):
    """Copies of a sharded model on a worker. `memory`: MB. `copied_to`: slots, as `gpu1/0`, whose workers have its copy.

    `keeps`: slots whose workers' copies it has. `shared`: the other workers of its host can read its copies.
    """

    memory: int
    copied_to: list[str]
    keeps: list[str]
    shared: bool


class Host(TypedDict):
    """One host. `cpu`: percent of all cores. `memory`: MB in use of `memory_total`.

    `backoff_until`: seconds since 1970 at which its back-off ends, 0 if it is not in back-off. `slots_backoff_until`: the
    same for each slot in back-off. `workers`: by `slot#incarnation`, and so are `copies`, which only hosts with a sharded
    model have. `ends_at`: seconds since 1970 at which the host ends, if that was announced.
    """

    address: str
    slots: int
    phase: str
    reason: str
    backoff_until: float
    cpu: int | None
    memory: int | None
    memory_total: int | None
    gpus: list[Gpu]
    slots_backoff_until: dict[str, float]
    workers: dict[str, WorkerRow]
    copies: NotRequired[dict[str, WorkerCopies]]
    ends_at: NotRequired[float]


class Event(TypedDict):
    """An event. `n`: its number. `time`: seconds since 1970. `size`: members of the world after it.

    `took`: milliseconds of each phase of a change, in order; `all` is the whole change.
    """

    n: int
    time: float
    kind: str
    text: str
    host: str
    worker: str
    generation: int
    took: dict[str, float]
    size: int


class RequestStatus(TypedDict):
    """A request of a user. `by`: the magic or view it came from. `word`: under way, done or refused. `why`: more about it."""

    id: str
    by: str
    text: str
    word: str
    why: str


class Copies(TypedDict):
    """Copies of a sharded model. `commit`: the newest whole one; None: none yet. `made_at`: when, in seconds since 1970.

    `seconds`: that copying it took. `memory`: MB of all copies, which are on `workers` workers.
    """

    commit: int | None
    made_at: float
    seconds: float
    memory: int
    workers: int


class Checkpoints(TypedDict):
    """The job's checkpoints, one every `every` commits. `commit`: of the newest one; None: there is none yet.

    `made_at`: when it was complete, in seconds since 1970. `size`: MB.
    """

    commit: int | None
    made_at: float
    size: float
    every: int


class Summary(TypedDict):
    """What losses have cost the job. `lost`: commits that had to be made again; None: not known.

    `trained`: percent of its time in which it trained; None: not known.
    """

    failures: int
    lost: int | None
    trained: float | None


class Driver(TypedDict):
    """The driver. `since`: seconds since 1970. `restarts`: how many drivers the cluster had before.

    `lease`: seconds for which the cluster lives without a client; None: it ends with its kernel.
    """

    pid: int
    since: float
    restarts: int
    lease: float | None
    versions: dict[str, str]


class ClusterView(TypedDict):
    """All that a view shows, except the time. `failed_at`: seconds since 1970."""

    name: str
    phase: str
    reason: str
    generation: int
    world_size: int
    min: int
    max: int | None
    job: str | None
    outcome: str
    step: int
    total: int | None
    steps_per_second: float | None
    report: dict[str, float | str]
    failed_at: float | None
    copies: Copies | None
    checkpoints: Checkpoints | None
    summary: Summary | None
    driver: Driver | None
    hosts: dict[str, Host]
    events: list[Event]
    orders: list[RequestStatus]


class KeyFrame(ClusterView):
    """The trait `state`. `n`: the number of the key frame. `time`: seconds since 1970."""

    n: int
    time: float


class Change(TypedDict, total=False):
    """The trait `change`: empty, or a JSON merge patch (RFC 7386) for the key frame with the number `base`."""

    base: int
    patch: dict[str, Any]
