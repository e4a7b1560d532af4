"""Messages between the driver and the agents, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from nbelastic.protocol import code_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.chaos import FaultKind
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.ids import Gpu, Interface, WorkerId
from nbelastic.protocol.messages import Message, NewDriver, Rehome
from nbelastic.protocol.status import GpuStatus


class AgentHello(Message):
    """Agent → driver: the agent runs, and this is its state. First message of each session.

    `addresses`, `port`: see `AgentReady`. Only a driver that has taken over needs the fields from `address` on.
    """

    host: str
    pid: int
    versions: dict[str, str]
    addresses: tuple[Interface, ...] = ()
    port: int = 0
    address: str = ""  # where its workers' stores listen
    workers: tuple[tuple[WorkerId, int], ...] = ()  # workers that run, with their pids
    newest: dict[int, int] = {}  # the highest incarnation so far, by slot
    nodes: tuple[int, ...] = ()  # numbers of the nodes that run
    ended: dict[int, int] = {}  # exit codes of nodes that have ended, by number
    gpus: tuple[Gpu, ...] = ()  # that its workers may use
    worker_gpus: dict[str, str] = {}  # by `str(WorkerId)`: the GPU of a worker that runs
    packages: dict[str, str] | None = None  # of the environment for the requirements, with versions; None: it has none


class AgentSample(Message):
    """Agent → driver: how busy the host and its workers are. Telemetry: a newer sample replaces this one."""

    host: str
    cpu: float  # percent of all cores together
    memory: int  # bytes in use
    workers: dict[str, tuple[float, int]]  # by `str(WorkerId)`: CPU in percent of one core, resident memory in bytes
    gpus: tuple[GpuStatus, ...] = ()  # all visible ones
    memory_total: int = 0  # bytes
    blocked: dict[str, float] = {}  # seconds for which a worker's main thread is in uninterruptible sleep (state D)
    throttled: tuple[str, ...] = ()  # GPUs that run slower than they could, and why


class AgentGoodbye(Message):
    """Agent → driver: a batch system, an administrator or a shutdown ends the agent, and its workers with it."""

    host: str
    reason: str


class AgentEnding(Message):
    """Agent → driver: something ends the agent `within` seconds. Its workers should leave before."""

    host: str
    within: float
    reason: str


class NodeExited(Message):
    """Agent → driver: the process of a node has ended. `code`: see `WorkerExited`."""

    host: str
    number: int
    code: int


class Spawn(Message):
    """Driver → agent: fork this worker."""

    worker: WorkerId
    log_dir: str
    gpu: str = ""  # the only GPU that it sees; empty: those of the agent


class StopWorker(Message):
    """Driver → agent: end this worker, with SIGTERM and then SIGKILL; `kill`: with SIGKILL at once."""

    worker: WorkerId
    kill: bool


class StopAgent(Message):
    """Driver → agent: end all workers, then yourself."""


class CancelEnd(Message):
    """Driver → agent: go on, if you were to end after SIGTERM: see `AgentEnding`."""


class Probe(Message):
    """Driver → agent: test at which `addresses` the prober of the host `target` answers, and report them with `Probed`."""

    target: str
    addresses: tuple[str, ...]
    port: int
    number: int


class InjectFault(Message):
    """Driver → agent: harm this worker, as the user wants to see what happens; without a worker, kill yourself.

    A worker that was stopped is killed after `STOPPED_FOR` seconds, if the driver has not ended it before.
    """

    kind: FaultKind
    worker: WorkerId | None = None


class DeleteKeptState(Message):
    """Driver → agent: delete the state that worker `by` has kept on this host's disk."""

    by: WorkerId


class Script(Message):
    """A script, as a client has submitted it. Times in seconds. `redirects` and `tee` have torchrun's format."""

    job: str
    target: str  # a file's absolute path, a module's name, or a program
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    cold: bool = False  # start new interpreters instead of forking the template
    role: str = "default"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    redirects: str = "0"
    tee: str = "0"
    environment: dict[str, str] = {}
    cwd: str = ""
    exit_barrier: float = 300.0
    shutdown: float = 30.0
    unset: tuple[str, ...] = ()  # variables of the agent that the script must not get


class StartNode(Message):
    """Driver → agent: start a node for this script. `number` distinguishes it from later nodes of the host."""

    number: int
    log_dir: str
    script: Script


class StopNode(Message):
    """Driver → agent: let this node end its workers and itself; `kill`: kill them at once."""

    number: int
    kill: bool = False


FromAgent = (
    NodeExited
    | AgentHello
    | AgentSample
    | AgentEnding
    | AgentGoodbye
    | code_messages.FetchCode
    | code_messages.CodeStored
    | ev.Probed
    | ev.GpusReported
    | EnvironmentReported
    | ev.WorkerStarted
    | ev.WorkerExited
    | ev.WorkerFrozen
)


ToAgent = (
    NewDriver
    | StartNode
    | StopNode
    | Spawn
    | StopWorker
    | StopAgent
    | CancelEnd
    | Probe
    | Rehome
    | DeleteKeptState
    | InjectFault
    | code_messages.StoreCode
    | code_messages.CodePiece
)
