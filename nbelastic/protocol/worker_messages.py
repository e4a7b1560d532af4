"""Messages between the driver and the workers, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from nbelastic.protocol import cell_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.messages import Blob, Message, NewDriver, Rehome, WorkerOutput
from nbelastic.protocol.rank_reports import OwnTime, ReplicaHashes


class WorkerHello(Message):
    """Worker → driver: the worker runs. Its first message."""

    worker: WorkerId
    pid: int
    refused: str = ""  # which modules its template has refused to import, and why


class WorkerReport(Message):
    """Worker → driver: the answer to `NewDriver`: all that the next driver must know of this worker."""

    worker: WorkerId
    pid: int
    is_ready: bool = False  # it can run programs and cells
    job: str = ""  # of its newest program
    busy: bool = False  # that program runs
    left_generation: int = 0  # the last generation that it has left
    generation: int = 0  # the present one; 0: none
    rank: int = 0
    size: int = 0  # members of the present generation
    formed: bool = False  # the present generation's group is built, it was not asked to leave it, and it is in no cell
    highest_generation: int = 0  # that it has received in a message
    has_promised: bool = False  # it stops at a commit, because it was asked to leave
    commit: int = 0  # commits since the job's beginning
    holds_state: bool = False  # it has the whole training state, of one commit
    store: str = ""  # where it offers a store for the next generation
    stop_reason: str = ""  # why the job is over for it, unless it failed itself
    last_event: ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None = None  # if not answered yet
    reports: tuple[tuple[int, dict[str, float | None]], ...] = ()  # values reported without a driver, by commit
    state_since: int = 0  # see `WorkerReady`
    engine: str = ""  # see `EngineConnected`; empty if it is none


class ConnectEngine(Message):
    """Driver → worker: become an engine of ipyparallel's controller, between two programs. `connection`: its information, as JSON."""

    connection: str


class EngineConnected(Message):
    """Worker → driver: it is an engine. `engine`: the uuid by which ipyparallel's client addresses it.

    With an `error` (one line) it could not become one. The next `ConnectEngine` has it try again.
    """

    worker: WorkerId
    engine: str
    error: str = ""


MOST_RANKS = 16  # that a worker lists
SomeRanks = Annotated[tuple[int, ...], Meta(max_length=MOST_RANKS)]


class Continued(Struct, frozen=True):
    """The commit from which a world of `size` continues after a loss, as its `rank` reports.

    `lost`: ranks of that commit's `generation` whose shards came from copies; 16 at most.
    """

    generation: int
    commit: int
    lost: SomeRanks = ()
    size: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    rank: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Copies(Struct, frozen=True, omit_defaults=True):
    """What a rank of a sharded model reports about copies of its commits.

    `whole`: the newest whole commit that it knows, made `age` seconds before the report, and copied in `seconds`. `nbytes`: the
    memory of its copies. `buddies`: ranks that keep a copy of its shard; `wards`: ranks whose copies it keeps; 16 at most.
    `shared`: other workers of its host can read its copies. `continued`: only in a generation that follows a loss.
    """

    nbytes: Annotated[int, Meta(ge=0, lt=2**53)]
    whole: int | None = None
    age: float = 0.0
    seconds: float = 0.0
    buddies: SomeRanks = ()
    wards: SomeRanks = ()
    shared: bool = False
    continued: Continued | None = None


class Checkpoint(Struct, frozen=True, omit_defaults=True):
    """What rank 0 reports about the job's checkpoints, of which one is written every `every` commits.

    `commit`: of the newest one, complete for `age` seconds at the report, of `size` bytes. None: it knows of none.
    """

    every: Annotated[int, Meta(ge=1, lt=2**53)]
    commit: int | None = None
    age: float = 0.0
    size: Annotated[int, Meta(ge=0, lt=2**53)] = 0


class WorkerProgress(Message):
    """Rank 0 → driver: the newest commit and the values that `state.report()` was given. Telemetry.

    A value of None is not a number, or infinite: JSON cannot represent those. `first`: milliseconds from the forming of the
    generation to its first commit, sent once per generation. `copies`: only with a `ShardedState`. `checkpoint`: only of jobs with checkpoints.
    `replica`: of any rank, not with a `ShardedState`. `own`: every few seconds, of any rank.
    """

    worker: WorkerId
    generation: int
    commit: int
    report: dict[str, float | None]
    first: float | None = None
    copies: Copies | None = None
    checkpoint: Checkpoint | None = None
    replica: ReplicaHashes | None = None
    own: OwnTime | None = None


class ProgramResult(Message):
    """Worker → driver: the program of `job` has ended, with `value`, or with an `error` (one line) and its `traceback`.

    The worker sends it again to each new driver, until its next program begins.
    """

    worker: WorkerId
    job: str
    error: str = ""
    traceback: str = ""
    value: Blob | None = None


class SwapReport(Message):
    """Worker → driver: what a new program has not taken over or, with an `error`, that it has ended before its first commit."""

    worker: WorkerId
    number: int
    notes: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""


class FetchCall(Message):
    """Worker → driver: send the pickled call of `job`, or the values of cell `push-N`, from byte `offset` on.

    The answer is a few `CallPiece`s. `number`: as in `Program`.
    """

    worker: WorkerId
    job: str
    offset: int
    number: int = 0


class ResultPiece(Message):
    """Worker → driver: the answer to `FetchResult`: bytes of the value of `job` from `offset` on."""

    worker: WorkerId
    job: str
    offset: int
    data: bytes


class StackShown(Message):
    """Worker → driver: the answer to `ShowStack`, sent by the link's thread. `place`: see `PositionReported`."""

    worker: WorkerId
    number: int
    place: str
    text: str  # the Python stack


class Program(Message):
    """Driver → worker: run this as the program of `job`: a cell's `source`, or a pickled `call`.

    `number`: 0, or the number of the swap that has replaced the job's program by this one. `workers`: how many there are now.
    """

    job: str
    log_dir: str
    checkpoints: tuple[str, int, int] | None = None  # the folder, commits between two, how many are kept
    source: str = ""
    call: Blob | None = None
    results: str = ""  # a folder for long results, on the driver's machine; empty: the driver fetches them
    number: int = 0
    workers: int = 0
    code: str = ""  # the version of the user's modules that it imports; empty: the worker finds them by itself
    cluster: str = ""  # its number, which other drivers of the cluster keep


class NewProgram(Message):
    """Driver → worker in the elastic loop: leave this generation, and run `program` inside the one that you run.

    `on_trial`: `KeepProgram` says whether you keep it.
    """

    program: Program
    generation: int
    on_trial: bool


class DebuggerInput(Message):
    """Driver → worker whose program waits in the debugger: the line for input number `number`."""

    number: int
    line: str


class KeepProgram(Message):
    """Driver → worker: the job's program has this number. Keep it if you try it; return to it if you try another one."""

    number: int


class CallPiece(Message):
    """Driver → worker: the answer to `FetchCall`: bytes of the call from `offset` on."""

    job: str
    offset: int
    data: bytes
    number: int = 0


class FetchResult(Message):
    """Driver → worker: send the value of `job` from byte `offset` on. The answer is a few `ResultPiece`s."""

    job: str
    offset: int


class AllowPeers(Message):
    """Driver → members: a host with these addresses starts workers, which may connect to the offered store."""

    addresses: tuple[str, ...]


class QueryPosition(Message):
    """Driver → member: report how far your main thread has come, with `PositionReported`."""

    generation: int


class ShowStack(Message):
    """Driver → worker: send the stack of your main thread, with `StackShown` of this number."""

    number: int


class Formation(Message):
    """Driver → all members alike: form this generation."""

    generation: int
    hosts: tuple[tuple[str, tuple[int, ...]], ...]  # by rank: each host with the slots of its members
    store: str
    root: int  # the rank that sends the training state
    receivers: tuple[tuple[int, int], ...]  # ranks that need it, as ranges: the first, and the one after the last
    backend: str = "gloo"  # or nccl; the same in all generations of a job


class Prepare(Message):
    """Driver → members of the next generation: build its process group beside the training."""

    formation: Formation


class DropGroup(Message):
    """Driver → member: destroy the process group of this generation; leave the generation if it is the present one."""

    generation: int


class Leave(Message):
    """Driver → member: leave this generation at `commit`.

    `commit` None: report your commit with `LeaveAcknowledged`, and stop at the next one. `STAY`: train on; do not leave, and
    do not stand still. `ask`: the number of the request, which the answer repeats. `removed`: the ranks that will not be in
    the next generation.
    """

    STAY: ClassVar[int] = -1
    generation: int
    commit: int | None = None
    ask: int = 0
    removed: tuple[int, ...] = ()


class Halt(Message):
    """Driver → member: stop at this commit of this generation, report `WorkerHalted`, and wait until `Leave.STAY`."""

    generation: int
    commit: int


class Abort(Message):
    """Driver → member: abort this generation's connections, so that blocked collectives raise, and leave it."""

    generation: int
    reason: str


class EndHungWorker(Message):
    """Driver → hung worker: end yourself; `keep`: first write the training state to this host's disk."""

    keep: bool


class LoadKeptState(Message):
    """Driver → worker that waits for a world: load the state of this commit, which worker `by` has kept on this host."""

    by: WorkerId
    commit: int


class StopProgram(Message):
    """Driver → worker: the job is over for you; `own`: because of the error that your own program has raised.

    `writes`: whether you write the last checkpoint; None: if you are rank 0.
    """

    job: str
    reason: str
    own: bool = False
    writes: bool | None = None


FromWorker = (
    WorkerHello
    | WorkerReport
    | EngineConnected
    | ev.WorkerReady
    | ev.StoreOffered
    | ev.WorkerPrepared
    | ev.WorkerFormed
    | ev.LeaveAcknowledged
    | ev.WorkerHalted
    | ev.WorkerRaised
    | ev.WorkerSucceeded
    | ev.WorkerHung
    | ev.StateKept
    | ev.PositionReported
    | pev.BreakpointReached
    | pev.BreakpointLeft
    | WorkerProgress
    | WorkerOutput
    | ProgramResult
    | cell_messages.CellResult
    | cell_messages.CellPiece
    | SwapReport
    | cell_messages.StatePulled
    | FetchCall
    | ResultPiece
    | StackShown
)


ToWorker = (
    NewDriver
    | Program
    | NewProgram
    | KeepProgram
    | DebuggerInput
    | cell_messages.Cell
    | cell_messages.CommitCell
    | cell_messages.InterruptCell
    | ConnectEngine
    | CallPiece
    | FetchResult
    | Formation
    | Prepare
    | DropGroup
    | Leave
    | Halt
    | Abort
    | EndHungWorker
    | LoadKeptState
    | StopProgram
    | Rehome
    | AllowPeers
    | QueryPosition
    | ShowStack
)
