"""The messages between the dashboard's Python side and its views in the browser. All are plain JSON.

The views' state has its types in `dashboard_frames`. `python widgets/write_contract.py` writes both as TypeScript to
`widgets/src/contract.d.ts`, with which the widget is type-checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from msgspec import Struct

from nbelastic.notebook.dashboard_frames import Event

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
    """A line of output. `writers`: runs `[first, last]` of places in the answer's `speakers`. `time`: seconds since 1970."""

    number: int
    stream: str
    text: str
    writers: list[list[int]]
    time: float = 0.0


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
