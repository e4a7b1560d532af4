"""What goes over the link and is no event of the core, and what either end may say.

An event that a worker or an agent sends is the same struct that `step` takes: one vocabulary.
"""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import struct
from typing import ClassVar

from msgspec import Struct

from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.ids import Interface, WorkerId


class Message(Struct, frozen=True, tag=True):
    """Something that goes over the wire and is no event of the core."""


class Welcome(Message):
    """From a driver that has taken the cluster over, to everybody whom it does not know yet: say who and where you are.

    `term` counts the cluster's drivers. Who has been welcomed with a higher one does not answer.
    """

    term: int


class AgentHello(Message):
    """`addresses` and `port`: as of `AgentReady`. The rest is told to a driver that has taken over.

    `address`: where its workers are reached now. `workers`: those that live, and their pids. `newest`: the highest
    incarnation that each slot has had. `nodes`: the scripts' nodes that live; `ended`: exit codes of those that do not.
    """

    host: str
    pid: int
    versions: dict[str, str]
    addresses: tuple[Interface, ...] = ()
    port: int = 0
    address: str = ""
    workers: tuple[tuple[WorkerId, int], ...] = ()
    newest: dict[int, int] = {}
    nodes: tuple[int, ...] = ()
    ended: dict[int, int] = {}


class AgentSample(Message):
    """`cpu` in percent of all cores together; `memory` in use, `of` how much there is, in bytes.

    `workers`: of each (`str(WorkerId)`) its CPU in percent of one core and its resident memory in bytes. `gpus`: of each
    visible one its utilisation in percent, the MB in use and the MB there are. `blocked`: of workers whose main thread is in
    uninterruptible sleep (state D), for how many seconds.
    """

    host: str
    cpu: float
    memory: int
    workers: dict[str, tuple[float, int]]
    gpus: tuple[tuple[int, int, int], ...] = ()
    of: int = 0
    blocked: dict[str, float] = {}


class AgentGoodbye(Message):
    """It was told to end by somebody else than the driver: a batch system, an administrator, a shutdown."""

    host: str
    reason: str


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


class Blob(Struct, frozen=True):
    """What `pickling.pack` made, of `size` bytes: `data`, or in a file at `path`; or neither, and the receiver fetches it."""

    size: int
    data: bytes = b""
    path: str = ""


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


class WorkerOutput(Message):
    """What the program of `job` wrote to `stream` (out or err), up to position `end` of all that it has written there.

    It may be said again, and some may be missing: the positions tell. The end may be a line that is not finished; a later
    text that begins with a carriage return replaces it. `rank`: the worker's when it wrote this.
    """

    worker: WorkerId
    stream: str
    text: str
    end: int
    job: str = ""
    rank: int | None = None


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


class Spawn(Message):
    """To an agent: fork this worker. Logs go to `log_dir`; `engine` is ipyparallel's connection information (JSON)."""

    worker: WorkerId
    log_dir: str
    engine: str


class StopWorker(Message):
    worker: WorkerId
    kill: bool


class StopAgent(Message):
    """To an agent: stop every worker and end."""


class Probe(Message):
    """To an agent: find out at which of `addresses` the prober of the host `target` answers, and say so with `Probed`."""

    target: str
    addresses: tuple[str, ...]
    port: int
    number: int


class Rehome(Message):
    """To an agent, for the workers it will start, and to each of its host's workers: your stores listen here from now on."""

    address: str
    interface: str


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


class DeleteKeptState(Message):
    """To an agent: remove what worker `by` has kept."""

    by: WorkerId


class StopProgram(Message):
    """The job is over for this worker; `own`: with its own error."""

    job: str
    reason: str
    own: bool = False


class Script(Message):
    """What `Cluster.run_script` was asked for. Times in seconds; `redirects` and `tee` are in torchrun's own words."""

    job: str
    target: str  # a file's absolute path, a module's name, or a program
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    cold: bool = False
    role: str = "default"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    redirects: str = "0"
    tee: str = "0"
    environment: dict[str, str] = {}
    cwd: str = ""
    exit_barrier: float = 300.0
    shutdown: float = 30.0
    unset: tuple[str, ...] = ()  # variables of the agents that a script is not to have


class Launch(Message):
    """To an agent: start a node for this script. Its logs go to `log_dir`; `number` tells it from later ones."""

    number: int
    log_dir: str
    script: Script


class StopNode(Message):
    """To an agent: end that node; `kill`: at once and without asking."""

    number: int
    kill: bool = False


class LaunchEnded(Message):
    """From an agent: the node's process has ended. `code` as of `WorkerExited`."""

    host: str
    number: int
    code: int


class NodeHello(Message):
    """A guest's first words, until it is answered. `machine`: which one it is on, so that its end can be watched."""

    host: str
    pid: int
    machine: str
    versions: dict[str, str]


class NodeSample(Message):
    """Of each worker of a node, by local rank: CPU in percent of one core, resident memory in bytes."""

    host: str
    round: int
    workers: tuple[tuple[float, int], ...]


class Round(Message):
    """A `FormRound` as one node gets it. `places` are of each seat, by group rank: see `group.places`."""

    round: int
    rank: int
    assignments: tuple[sev.Assignment, ...]
    places: tuple[tuple[int, int, int, int], ...]
    store: str
    restarts: int
    job: str


class LeaveRound(Message):
    round: int
    reason: str


class Wait(Message):
    """Not yet, and why. `full`: because there is no room."""

    reason: str
    full: bool = False


class EndNode(Message):
    """The node is to end; `error`: as one that has failed."""

    reason: str
    error: bool = True


FromAgent = (
    LaunchEnded
    | AgentHello
    | AgentSample
    | AgentGoodbye
    | ev.Probed
    | ev.WorkerStarted
    | ev.WorkerExited
    | ev.WorkerFrozen
)
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
FromNode = (
    NodeHello
    | NodeSample
    | WorkerOutput
    | sev.NodeReady
    | sev.NodeStarted
    | sev.NodeFailed
    | sev.NodeSucceeded
    | sev.NodeLeft
)
ToAgent = Welcome | Launch | StopNode | Spawn | StopWorker | StopAgent | Probe | Rehome | DeleteKeptState
ToNode = Welcome | Round | LeaveRound | Wait | EndNode | Rehome
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


# who speaks, the message's number, the first one kept; whom it has heard, up to which number
HEAD = struct.Struct("<QQQQQ")
