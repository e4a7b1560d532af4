"""Events of the cluster, in the past tense: the input of the core."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from msgspec import Struct, field

from nbelastic.protocol.ids import Gpu, HostSpec, Interface, WorkerId
from nbelastic.protocol.messages import Pushed


class Event(Struct, frozen=True, tag=True):
    """Base of all events. An event has no time: the driver's clock stamps it on receipt."""


class HostAdded(Event):
    """Client → core: use this host. `by`: which client. `by_hand`: it stays, whatever a discovery lists."""

    host: HostSpec
    by: str = ""
    by_hand: bool = True


class HostRemoved(Event):
    """Client or agent → core: remove this host after its workers have left at a commit; `now`: at once."""

    name: str
    now: bool = False
    by: str = ""
    within: float | None = None  # seconds after which the host ends, whether or not they have left; None: any time
    replaced: bool = False  # another host takes its place


class HostsDiscovered(Event):
    """Discovery → core: these are the hosts. The core adds and removes the differences."""

    hosts: tuple[HostSpec, ...]


class DiscoveryFailed(Event):
    """Discovery → core: no answer. The driver sends this once for each new reason."""

    reason: str


class Scaled(Event):
    """Client → core: new bounds of the world size."""

    min: int
    max: int | None
    by: str = ""


class ExternalAccessOpened(Event):
    """Driver → core: terminals of other machines may join; they reach this machine at `address`."""

    address: str


class RestartRequested(Event):
    """Client → core: replace this worker's process now."""

    worker: WorkerId
    by: str = ""


class SetupSubmitted(Event):
    """Client → core: run a setup cell. It replaces the cell with the same `key`. `version` is unique among all cells.

    With `pushed`, each worker takes these values instead of running the cell.
    """

    key: str
    source: str
    version: int
    pushed: Pushed | None = None


class CommitCellSubmitted(Event):
    """Client → core: run a cell at the next commit, on these `ranks` (empty: on all). `limit`: seconds."""

    number: int
    ranks: tuple[int, ...] = ()
    limit: float = 30.0


class CommitCellCancelled(Event):
    """Driver → core: no client waits for this cell any more."""

    number: int


class PauseRequested(Event):
    """Client → core: stop the training at its next commit, until `ResumeRequested`. `by`: which client."""

    by: str = ""


class ResumeRequested(Event):
    """Client → core: train on. `by`: which client."""

    by: str = ""


class StepsRequested(Event):
    """Client → core: make so many commits, and pause again. `by`: which client."""

    steps: int
    by: str = ""


class SetupCleared(Event):
    """Client → core: later workers do not run the setup cell with this key; without a key, none of the cells."""

    key: str = ""


class JobSubmitted(Event):
    """Client → core: run the job of this name."""

    job: str


class JobStopRequested(Event):
    """Client → core: stop the job of this name."""

    job: str
    reason: str = "stopped by hand"


class StopRequested(Event):
    """Client, driver → core: stop the cluster.

    `within`: seconds in which programs must end; None: `stop_timeout`. A repeated request can only shorten the time.
    """

    reason: str = "stopped by hand"
    within: float | None = None


class Ticked(Event):
    """Driver → core: the deadline that `deadline(cluster)` has returned has passed."""


class AgentReady(Event):
    """Driver → core, after the agent's hello: this agent can start workers.

    `addresses` are in the agent's order of preference, first the one from which it reaches the driver. Only an agent on the
    driver's machine has loopback addresses, and has them first. Its prober listens on each of them at `port`.
    """

    host: str
    pid: int
    addresses: tuple[Interface, ...] = ()
    port: int = 0
    problem: str = ""  # why the host cannot be used, as "nbelastic 0.2 there, 0.3 here"
    driver_address: str = ""  # where the agent reaches the driver's machine; empty: it runs on that machine
    gpus: tuple[Gpu, ...] = ()  # that its workers may use


class GpusReported(Event):
    """Agent → core: after its hello, the agent has found other GPUs, or a problem of one, or that a problem is gone."""

    host: str
    gpus: tuple[Gpu, ...]


class Probed(Event):
    """Agent → core: the result of the `Probe` with this number. `target` answered at the addresses in `reached`."""

    host: str
    target: str
    reached: tuple[str, ...]
    number: int = 0


class AgentLost(Event):
    """Driver → core: the agent of this host has ended, or sends nothing.

    `silent_for`: seconds without a message, if the driver noticed it by that. `number`: which start of the agent; 0: the
    newest.
    """

    host: str
    reason: str
    silent_for: float = 0.0
    number: int = 0


class WorkerStarted(Event):
    """Agent → core: the worker's process runs."""

    worker: WorkerId
    pid: int


class WorkerExited(Event):
    """Agent → core: the worker's process has ended. A negative `code` is a signal's number. `last_line`: of its `.err` file."""

    worker: WorkerId
    code: int
    last_line: str = ""


class WorkerFrozen(Event):
    """Agent, driver → core: the worker's process is stopped or a zombie, or sends nothing; it cannot take part.

    If a whole host sends nothing, the driver sends `AgentLost` instead, or before: then the failure is the host's.
    `silent_for`: seconds without a message, if the driver noticed it by that.
    """

    worker: WorkerId
    state: str
    silent_for: float = 0.0


class WorkerSilent(Event):
    """Driver → core: no message from this worker for `seconds`, though its host answers and its process is not stopped.

    The driver repeats it about once per second. `idle`: the process uses no CPU time. `state`: of the main thread, in words,
    if it is unusual.
    """

    worker: WorkerId
    seconds: float
    idle: bool = False
    state: str = ""


class WorkerResponded(Event):
    """Driver → core: after `WorkerSilent`, a message from this worker has arrived."""

    worker: WorkerId


class WorkerRegistered(Event):
    """Driver → core: the worker can run code."""

    worker: WorkerId


class SetupEnded(Event):
    """Driver → core: the worker has run this version of a setup cell. `error`: empty if it succeeded."""

    worker: WorkerId
    version: int
    error: str = ""


class WorkerReady(Event):
    """Worker → core: the worker waits in the elastic loop for a world, after it has left `generation` (0: none).

    `commit`: commits since the job's beginning; it belongs to the training state, and the highest is the newest. `clean`:
    its live tensors are those of that commit. `store`: where it offers a store. `holds_state`: it has the whole training
    state, of one commit; False before its first world, and after a transfer that broke off. `state_since`: the last
    generation in which it received that state or trained with it. `program`: which one of the job it runs, from 0.
    """

    worker: WorkerId
    job: str
    generation: int
    commit: int
    clean: bool
    store: str
    holds_state: bool = False
    state_since: int = 0
    program: int = 0


class StoreOffered(Event):
    """Worker → core: while it trains in `generation`, it has made a store for the next generation, at `store`."""

    worker: WorkerId
    generation: int
    store: str


class WorkerPrepared(Event):
    """Worker → core: its process group for the next generation is built, beside the present one; or `error`."""

    worker: WorkerId
    generation: int
    error: str = ""


class WorkerFormed(Event):
    """Worker → core: it has joined the process group of this generation, and has the training state."""

    worker: WorkerId
    generation: int
    took: dict[str, float] = field(default_factory=dict)  # milliseconds, by phase


class LeaveAcknowledged(Event):
    """Worker → core: the answer to `Leave`: it has made this `commit` of its generation, and stops at the next one.

    `ask`: the number in that `Leave`, which a later one may have revoked.
    """

    worker: WorkerId
    generation: int
    commit: int
    ask: int = 0


class WorkerHalted(Event):
    """Worker → core: it has come to this `commit` of its generation, as agreed, and waits there."""

    worker: WorkerId
    generation: int
    commit: int


class CommitCellEnded(Event):
    """Driver → core: the worker has run this cell, which has begun so many collectives. `changed`: see `CellResult`."""

    worker: WorkerId
    number: int
    begun: int = 0
    changed: str = ""


class WorkerRaised(Event):
    """Worker → core: the user's function raised an exception.

    `intact`: all connections of the generation work, so that no broken collective can be the cause.
    """

    worker: WorkerId
    generation: int
    intact: bool
    error: str


class WorkerSucceeded(Event):
    """Worker → core: the user's elastic function has returned."""

    worker: WorkerId
    generation: int


class WorkerHung(Event):
    """Worker → core: its main thread blocks in a collective of `generation` though that was aborted.

    Repeated until `EndHungWorker`. `commit`: of its training state. `keeping`: it writes that to disk, as `EndHungWorker` asked.
    """

    worker: WorkerId
    generation: int
    commit: int = 0
    keeping: bool = False


class StateKept(Event):
    """Worker → core: hung, it has written its training state of this commit to disk. Repeated until `EndHungWorker`."""

    worker: WorkerId
    job: str
    commit: int


class StallDetected(Event):
    """Driver → core: the running world has made no commit for `seconds`. Repeated about once per second."""

    generation: int
    seconds: float


class StallResolved(Event):
    """Driver → core: after `StallDetected`, the world makes commits again. Sent once."""

    generation: int


class PositionReported(Event):
    """Member → core: the answer to `QueryPosition`, sent by the link's thread: how far the main thread has come.

    `commit`: commits since the job's beginning, as in `WorkerReady` and unlike `LeaveAcknowledged`. `begun`: collectives
    begun in `generation` since all ranks have the training state. `place`: the innermost frame of the user's code, as
    "train.py:88 in load"; empty if there is none. `cpu`: seconds of CPU time of the process's other threads.
    `connected`: the generation's process group is built.
    """

    worker: WorkerId
    generation: int
    commit: int
    begun: int
    place: str = ""
    cpu: float = 0.0
    connected: bool = False


class ProgramEnded(Event):
    """Driver → core: the job's whole program (cell or function) has ended on this worker. `error`: empty if it succeeded."""

    worker: WorkerId
    job: str
    error: str = ""
