"""Messages between the driver and the workers, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from typing import ClassVar

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.messages import Blob, Message, Rehome, Welcome, WorkerOutput


class WorkerHello(Message):
    worker: WorkerId
    pid: int
    engine: str  # the engine's uuid: how ipyparallel's client will name it


class WorkerReport(Message):
    """To a driver that has taken over: all that it needs to know of this worker.

    `engine` is empty as long as there is none. `job` is that of its newest program, `busy` whether that runs. `left` is the last generation that it has
    left, `generation` the one it is in (0: none), of `size` members, `formed` whether its group stands and is not to be left. `numbered` is the highest
    generation that it has heard of. `bound`: it was asked to leave, and has promised not to go on by itself. `commit` counts from
    the job's beginning, `holds` says whether it has the job's state, all of one commit, `store` is what it offers for the next generation.
    `since`: as of `WorkerReady`.
    `stopped`: why it was told that the job is over for it, if it was, and not with its own error.
    `word` is its last one, if that still waits for an answer. `reports`: what it has reported meanwhile, by commit.
    """

    worker: WorkerId
    pid: int
    engine: str = ""
    job: str = ""
    busy: bool = False
    left: int = 0
    generation: int = 0
    rank: int = 0
    size: int = 0
    formed: bool = False
    numbered: int = 0
    bound: bool = False
    commit: int = 0
    holds: bool = False
    store: str = ""
    stopped: str = ""
    word: ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None = None
    reports: tuple[tuple[int, dict[str, float | None]], ...] = ()
    since: int = 0


class WorkerProgress(Message):
    """`first`: milliseconds from the world's forming to its first commit, sent once a generation. A reported None is what JSON
    has no number for: not a number, or infinite.
    """

    worker: WorkerId
    generation: int
    commit: int
    report: dict[str, float | None]
    first: float | None = None


class ProgramResult(Message):
    """How the program of `job` ended: with `value`, or with an `error` (one line) and its `traceback`.

    It is sent again to each new driver, until the next program begins.
    """

    worker: WorkerId
    job: str
    error: str = ""
    traceback: str = ""
    value: Blob | None = None


class CellResult(Message):
    """What cell `number` printed, and its error, in one line and with its traceback; both are empty if it has none."""

    worker: WorkerId
    number: int
    stdout: str
    stderr: str
    error: str
    traceback: str


class FetchCall(Message):
    """Send the call of `job` from `offset` on, in several `CallPiece`s: not all of it, if it is long."""

    worker: WorkerId
    job: str
    offset: int


class ResultPiece(Message):
    """The answer to `FetchResult`: bytes of the value of `job` from `offset` on."""

    worker: WorkerId
    job: str
    offset: int
    data: bytes


class StackShown(Message):
    """The answer to `ShowStack`, from the thread of the link. `place` is as of `PositionReported`; `text` the Python stack."""

    worker: WorkerId
    number: int
    place: str
    text: str


class Program(Message):
    """To a worker: run this as the program of `job`. It is a cell's `source`, or a pickled `call`.

    `checkpoints`: the folder, commits between two, how many are kept. A long result goes into a file in the folder `results`,
    if there is one that the driver sees too.
    """

    job: str
    log_dir: str
    checkpoints: tuple[str, int, int] | None = None
    source: str = ""
    call: Blob | None = None
    results: str = ""


class Cell(Message):
    """To a worker: run this cell between programs."""

    number: int
    source: str


class CallPiece(Message):
    """The answer to `FetchCall`: bytes of the call of `job` from `offset` on."""

    job: str
    offset: int
    data: bytes


class FetchResult(Message):
    """Send the value of `job` from `offset` on, in several `ResultPiece`s: not all of it, if it is long."""

    job: str
    offset: int


class AllowPeers(Message):
    """To members: workers are being started on a host with these addresses, and may come to the store that is on offer."""

    addresses: tuple[str, ...]


class QueryPosition(Message):
    """To a member: say where you are, with `PositionReported`."""

    generation: int


class ShowStack(Message):
    """To a worker: say where each of your threads is, with `StackShown` of this `number`."""

    number: int


class Formation(Message):
    """A `FormWorld`, the same for all of its members.

    `hosts`: in rank order, each with its members' slots. `receivers`: ranges of ranks (the first, and the one after the last).
    """

    generation: int
    hosts: tuple[tuple[str, tuple[int, ...]], ...]
    store: str
    root: int
    receivers: tuple[tuple[int, int], ...]


class Prepare(Message):
    """A `PrepareWorld`."""

    formation: Formation


class DropGroup(Message):
    generation: int


class Leave(Message):
    """`commit` None: say where you are (and hold at the next commit); a number: leave there; -1: stay after all.

    `ask` numbers a question; the answer repeats it.
    """

    STAY: ClassVar[int] = -1
    generation: int
    commit: int | None = None
    ask: int = 0


class Abort(Message):
    generation: int
    reason: str


class EndHungWorker(Message):
    """To a worker that is stuck: end; `keep`: first write the training state to this host's disk."""

    keep: bool


class LoadKeptState(Message):
    """To a worker that waits for a world: the state of this `commit` is on this host's disk, where worker `by` has kept it."""

    by: WorkerId
    commit: int


class StopProgram(Message):
    """The job is over for this worker; `own`: with its own error."""

    job: str
    reason: str
    own: bool = False


FromWorker = (
    WorkerHello
    | WorkerReport
    | ev.WorkerReady
    | ev.StoreOffered
    | ev.WorkerPrepared
    | ev.WorkerFormed
    | ev.LeaveAcknowledged
    | ev.WorkerRaised
    | ev.WorkerSucceeded
    | ev.WorkerHung
    | ev.StateKept
    | ev.PositionReported
    | WorkerProgress
    | WorkerOutput
    | ProgramResult
    | CellResult
    | FetchCall
    | ResultPiece
    | StackShown
)


ToWorker = (
    Welcome
    | Program
    | Cell
    | CallPiece
    | FetchResult
    | Formation
    | Prepare
    | DropGroup
    | Leave
    | Abort
    | EndHungWorker
    | LoadKeptState
    | StopProgram
    | Rehome
    | AllowPeers
    | QueryPosition
    | ShowStack
)
