"""Events, in the past tense: what the core is told."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct, field

from nbelastic.protocol.ids import HostSpec, Interface, WorkerId

HUNG = 75  # exit code of a worker that could not leave an aborted collective: it is replaced, without a strike


class Event(Struct, frozen=True, tag=True):
    """Something that happened. Time is not in it: it is stamped on receipt, with the driver's clock."""


class HostAdded(Event):
    host: HostSpec
    by: str = ""


class HostRemoved(Event):
    name: str
    now: bool = False
    by: str = ""


class HostsDiscovered(Event):
    hosts: tuple[HostSpec, ...]


class DiscoveryFailed(Event):
    """The host discovery did not answer; `reason` says why. The driver sends it once for each new reason."""

    reason: str


class Scaled(Event):
    min: int
    max: int | None
    by: str = ""


class ExternalAccessOpened(Event):
    """Terminals of other machines are let in: they come to this machine at `address`."""

    address: str


class RestartRequested(Event):
    """Somebody wants another process in this worker's place, now."""

    worker: WorkerId
    by: str = ""


class SetupSubmitted(Event):
    """Somebody runs a setup cell. `key` names it: a cell with the same key is replaced. No other has this `version`."""

    key: str
    source: str
    version: int


class SetupCleared(Event):
    """Later workers do not run the setup cell of this key any more; without a key, none at all."""

    key: str = ""


class JobSubmitted(Event):
    job: str


class JobStopRequested(Event):
    job: str
    reason: str = "stopped by hand"


class StopRequested(Event):
    """`within`: seconds that programs may take to end, if not as long as usual. Said again, it can only be sooner."""

    reason: str = "stopped by hand"
    within: float | None = None


class Ticked(Event):
    """A deadline that `deadline(world)` named has come."""


class AgentReady(Event):
    """An agent can start workers. The driver says so on the agent's hello.

    `addresses` are in the agent's order of preference: first the one from which it reaches the driver; loopback ones only
    on the driver's own machine, where they come first. On each of them, at `port`, its prober listens. `problem`, which
    the driver finds in the hello, says why this host cannot be used ("nbelastic 0.2 there, 0.3 here"). `here`: where it
    comes to the driver's machine; empty: it is on it.
    """

    host: str
    pid: int
    addresses: tuple[Interface, ...] = ()
    port: int = 0
    problem: str = ""
    here: str = ""


class Probed(Event):
    """The agent of `host` has done the `Probe` of this `number`: at the addresses in `reached`, `target` answered."""

    host: str
    target: str
    reached: tuple[str, ...]
    number: int = 0


class AgentLost(Event):
    """`quiet`: seconds for which it was not heard, if that is how its end was noticed. `number`: which start of it; 0: the last."""

    host: str
    reason: str
    quiet: float = 0.0
    number: int = 0


class WorkerStarted(Event):
    worker: WorkerId
    pid: int


class WorkerExited(Event):
    """`code` as of `multiprocessing`: negative is the signal that killed it."""

    worker: WorkerId
    code: int


class WorkerFrozen(Event):
    """Its process is stopped or a zombie, or was not heard of: it will not take part in anything.

    A host's silence is its workers' too, and is said as `AgentLost` alone, or before them: then the host is to blame.
    `quiet`: seconds for which it was not heard, if that is how it was noticed.
    """

    worker: WorkerId
    state: str
    quiet: float = 0.0


class WorkerSilent(Event):
    """Nothing was heard of it for `seconds`, though its host answers and its process exists and is not stopped.

    The driver sends it about once a second while that lasts. `idle`: its process uses no CPU time. `state`: of its main
    thread, in words, if that is unusual.
    """

    worker: WorkerId
    seconds: float
    idle: bool = False
    state: str = ""


class WorkerResponded(Event):
    """After `WorkerSilent` it is heard again."""

    worker: WorkerId


class WorkerRegistered(Event):
    """Its engine takes code."""

    worker: WorkerId


class SetupEnded(Event):
    """It has run this version of a setup cell; `error` is empty if that succeeded."""

    worker: WorkerId
    version: int
    error: str = ""


class WorkerReady(Event):
    """It waits in the elastic loop for a world, having left `generation` (0: none). It offers a store at `store`.

    `commit` counts from the beginning of the job and travels with the state: the highest is the newest. `holds`: it has the
    job's state, all of one commit, and was in the world of generation `since` with it. It has none before its first world, nor when
    the transfer of a state broke off halfway.
    """

    worker: WorkerId
    job: str
    generation: int
    commit: int
    clean: bool
    store: str
    holds: bool = False
    since: int = 0


class StoreOffered(Event):
    """While it trains in `generation` it has made a store for the one after, at `store`."""

    worker: WorkerId
    generation: int
    store: str


class WorkerPrepared(Event):
    """Its process group of `generation` stands, beside the one it may be training in; or why it does not.

    `supported` is False if no group can be prepared there at all, as with NCCL.
    """

    worker: WorkerId
    generation: int
    error: str = ""
    supported: bool = True


class WorkerFormed(Event):
    worker: WorkerId
    generation: int
    took: dict[str, float] = field(default_factory=dict)  # milliseconds a phase


class LeaveAcknowledged(Event):
    """Asked to leave, it has just made commit number `commit` of this generation and promises to stop at the next one.

    `ask` is the number of the `AskLeave` that it answers: the promise that an older one got may have been taken back.
    """

    worker: WorkerId
    generation: int
    commit: int
    ask: int = 0


class WorkerRaised(Event):
    """The user's function raised. `intact`: none of this generation's connections was lost, so it was not a collective."""

    worker: WorkerId
    generation: int
    intact: bool
    error: str


class WorkerSucceeded(Event):
    worker: WorkerId
    generation: int


class WorkerHung(Event):
    """Its main thread sleeps in a collective of `generation`, and the abort does not wake it. It asks for `EndHungWorker`, until it gets it.

    `commit`: of its state. `keeping`: it was told to keep that, and is at it.
    """

    worker: WorkerId
    generation: int
    commit: int = 0
    keeping: bool = False


class StateKept(Event):
    """Stuck, it has written the state of this `commit` to its host's disk. It says so until it is told to end."""

    worker: WorkerId
    job: str
    commit: int


class StallDetected(Event):
    """In a running world no commit was made for `seconds`. The driver says so every second or so while that lasts."""

    generation: int
    seconds: float


class StallResolved(Event):
    """After `StallDetected` commits are made again. The driver says so once."""

    generation: int


class PositionReported(Event):
    """A member's answer to `QueryPosition`, from the thread of its link: how far the main thread is.

    `commit` is the total since the job's beginning, as people are shown it and as `WorkerReady` has it, and unlike that
    of `LeaveAcknowledged`. `begun` counts the collectives begun in `generation` since all have the state. `place` is the innermost
    frame of the user's own code, as "train.py:88 in load"; empty if there is none. `cpu`: seconds of processor time that
    this process's other threads have used. `connected`: the process group of its generation stands.
    """

    worker: WorkerId
    generation: int
    commit: int
    begun: int
    place: str = ""
    cpu: float = 0.0
    connected: bool = False


class ProgramEnded(Event):
    """The whole program (cell or function) ended on this worker; `error` is empty if it ended well."""

    worker: WorkerId
    job: str
    error: str = ""
