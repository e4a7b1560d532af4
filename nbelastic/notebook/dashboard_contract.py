"""The messages between the dashboard's Python side and its views in the browser. All are plain JSON.

`python widgets/write_contract.py` writes these types as TypeScript to `widgets/src/contract.d.ts`, with which the widget is
type-checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NotRequired, TypedDict

from msgspec import Struct

# ---- To the views, as the widget's two traits `state` and `change`


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
    """One GPU. `busy`: percent of the time. `memory`: GB in use, of `memory_total`. `temperature`: °C."""

    busy: int
    memory: float
    memory_total: float
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


# ---- From the views: requests of the user, and queries. `id` is the view's own name for the message


class Request(Struct, tag_field="order"):
    """A request of the user. The driver handles it; `KeyFrame.orders` lists its outcome."""

    id: str = ""


class AddHost(Request, tag="add_host", kw_only=True):
    """`host`: its name and slots, as `gpu3:2`."""

    host: str


class RemoveHost(Request, tag="remove_host", kw_only=True):
    """`now`: do not wait for the next commit."""

    host: str
    now: bool


class RestartWorker(Request, tag="restart", kw_only=True):
    """`worker`: its id."""

    worker: str


class Scale(Request, tag="scale", kw_only=True):
    """Bounds of the world's size. `max`: None for no limit."""

    min: int | None
    max: int | None


class PauseJob(Request, tag="pause"):
    """Stop the training at its next commit, until `ResumeJob`."""


class ResumeJob(Request, tag="resume"):
    """Let the training go on."""


class StopJob(Request, tag="stop_job"):
    """Stop the job that runs."""


class StopCluster(Request, tag="stop"):
    """Stop the cluster."""


AnyRequest = AddHost | RemoveHost | RestartWorker | Scale | PauseJob | ResumeJob | StopJob | StopCluster


class Query(Struct, tag_field="ask"):
    """A question of one view. The answer has the query's `id` as `reply`."""

    id: str = ""


class HelloQuery(Query, tag="hello"):
    """Whether the kernel answers."""


class FrameQuery(Query, tag="frame"):
    """A new key frame, because this view has missed the last one."""


class HistoryQuery(Query, tag="history"):
    """Events before the event with the number `before` or, without it, the newest."""

    before: int | None = None


class LogsQuery(Query, tag="logs", kw_only=True):
    """Lines after the line with the number `since`, of one worker or of all."""

    since: int
    worker: str | None = None


class ReportsQuery(Query, tag="reports"):
    """The reports that this view lacks, which has `count` rows of `version`."""

    version: str = ""
    count: int = 0


class StacksQuery(Query, tag="stacks"):
    """Where each rank is now."""


class StepTimesQuery(Query, tag="step_times"):
    """How long each rank's steps took without waiting for others."""


class TraceQuery(Query, tag="trace"):
    """The cluster's events as a trace for Perfetto."""


AnyQuery = HelloQuery | FrameQuery | HistoryQuery | LogsQuery | ReportsQuery | StacksQuery | StepTimesQuery | TraceQuery


# ---- Answers to queries, sent to all views


class Writer(NamedTuple):
    """A worker and the rank it had when it printed."""

    worker: str
    rank: int | None


class OutputLine(NamedTuple):
    """A line of output. `writers`: runs `[first, last]` of places in the answer's `speakers`."""

    number: int
    stream: str
    text: str
    writers: list[list[int]]


class StackGroup(TypedDict):
    """Workers with the same stack. `place`: the innermost frame of the user's code."""

    workers: list[Writer]
    place: str
    text: str
    note: str


class Empty(TypedDict):
    """An answer without content."""


class HistoryAnswer(TypedDict):
    """`oldest`: the number of the first event that the kernel still has."""

    events: list[Event]
    oldest: int


class LogsAnswer(TypedDict):
    """`next`: the number to use as `since` in the next query. `more`: there are more lines now. `writers`: all that have printed.

    `unfinished`: lines without a newline yet, as of progress bars.
    """

    job: str | None
    speakers: list[Writer]
    lines: list[OutputLine]
    unfinished: list[OutputLine]
    next: int
    more: bool
    writers: list[Writer]


class ReportsAnswer(TypedDict):
    """Rows of the history from place `start` on. Each is step, time, generation, size of the world, and the values of `names`.

    A short row lacks the last names. If `version` is not the view's, all rows are new.
    """

    version: str
    start: int
    names: list[str]
    rows: list[list[float | None]]


class StacksAnswer(TypedDict):
    """`silent`: workers that have not answered."""

    stacks: list[StackGroup]
    silent: list[Writer]


class StepTimesRow(NamedTuple):
    """The times of a rank: milliseconds in each column, or null."""

    worker: str
    times: list[float | None]


class StepTimesAnswer(TypedDict):
    """`span`: seconds of one column, of which the last ends at `end`. `rows`: of each rank. `texts`: of the slow ones, by rank."""

    span: float
    end: float
    rows: list[StepTimesRow]
    texts: dict[str, str]


class TraceAnswer(TypedDict):
    """`trace`: the content of a trace file."""

    trace: dict[str, Any]


class Answers(TypedDict):
    """The answer to each query, by its `ask`."""

    hello: Empty
    frame: Empty
    history: HistoryAnswer
    logs: LogsAnswer
    reports: ReportsAnswer
    stacks: StacksAnswer
    step_times: StepTimesAnswer
    trace: TraceAnswer


class Refusal(TypedDict):
    """The answer to a query or request that has failed."""

    error: str


AnyAnswer = Empty | HistoryAnswer | LogsAnswer | ReportsAnswer | StacksAnswer | StepTimesAnswer | TraceAnswer | Refusal
