"""Messages between the driver and the agents, and which of them each end may send."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import Interface, WorkerId
from nbelastic.protocol.messages import Message, Rehome, Welcome


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


class LaunchEnded(Message):
    """From an agent: the node's process has ended. `code` as of `WorkerExited`."""

    host: str
    number: int
    code: int


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


class DeleteKeptState(Message):
    """To an agent: remove what worker `by` has kept."""

    by: WorkerId


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


ToAgent = Welcome | Launch | StopNode | Spawn | StopWorker | StopAgent | Probe | Rehome | DeleteKeptState
