"""Commands, in the imperative: what the core decides. Their results come back as events."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.messages import Pushed


class Command(Struct, frozen=True, tag=True):
    """A command for the driver."""


class StartAgent(Command):
    host: HostSpec


class StopAgent(Command):
    host: str


class CancelEnd(Command):
    """The agent of `host` goes on, if it was to end: the host was added again."""

    host: str


class Probe(Command):
    """The agent of `host` finds out at which of these addresses the prober of `target` answers: see `Probed`."""

    host: str
    target: str
    addresses: tuple[str, ...]
    port: int
    number: int


class Rehome(Command):
    """From now on the workers of this host use `address`, of `interface`: those that live and those that start later.

    A worker that lives keeps the connections of its generation. It offers a new store at the new address: at once, by
    `WorkerReady`, if it waits for a world, and by `StoreOffered` if it trains.
    """

    host: str
    address: str
    interface: str


class QueryPosition(Command):
    """These members report their positions, as no commit is made or others wait for them: see `PositionReported`."""

    generation: int
    members: tuple[WorkerId, ...]


class StartWorker(Command):
    """Start this worker. `gpu`: the only GPU that it sees; empty: those of its agent."""

    worker: WorkerId
    gpu: str = ""


class StopWorker(Command):
    """End the worker. `kill`: at once, by SIGKILL."""

    worker: WorkerId
    kill: bool = False


class EndHungWorker(Command):
    """The answer to `WorkerHung` and `StateKept`: the worker ends. `keep`: it writes the training state to disk first."""

    worker: WorkerId
    keep: bool = False


class LoadKeptState(Command):
    """Read the state of this `commit` that the worker `by` has kept on this host, then report `WorkerReady` again."""

    worker: WorkerId
    by: WorkerId
    commit: int


class DeleteKeptState(Command):
    """Delete what the worker `by` has kept on its host."""

    by: WorkerId


class RunSetup(Command):
    """Run a setup cell. The result is `SetupEnded`."""

    worker: WorkerId
    version: int
    source: str
    pushed: Pushed | None = None  # values that the worker takes instead


class RunProgram(Command):
    worker: WorkerId
    job: str


class FormWorld(Command):
    """`members` by rank. `root` is the rank with the newest training state; `receivers` are the ranks that need it."""

    generation: int
    members: tuple[WorkerId, ...]
    store: str
    root: int
    receivers: tuple[int, ...]
    to: tuple[WorkerId, ...] = ()  # only these, which did not receive it; empty: all members


class PrepareWorld(Command):
    """Build the process group of the next generation in the background. Its `FormWorld` may follow."""

    formation: FormWorld


class DropWorld(Command):
    """The next generation is cancelled: drop what was prepared, and leave it if it was entered."""

    generation: int
    members: tuple[WorkerId, ...]


class AskLeave(Command):
    """Report the commit, and stop at the next one, as the members are about to leave."""

    generation: int
    members: tuple[WorkerId, ...]
    number: int


class LeaveAt(Command):
    """Leave the generation after this commit. The ranks `removed` will not be in the next one."""

    generation: int
    commit: int
    members: tuple[WorkerId, ...]
    removed: tuple[int, ...] = ()


class HaltAt(Command):
    """Stop at this commit of the generation, and wait there. The result is `WorkerHalted`."""

    generation: int
    commit: int
    members: tuple[WorkerId, ...]


class RunCommitCell(Command):
    """Run this cell on members that stand at a commit. The result is `CommitCellEnded`. `limit`: seconds.

    `everywhere`: all members run it, so it may change the training state.
    """

    number: int
    generation: int
    workers: tuple[WorkerId, ...]
    limit: float
    everywhere: bool


class TryProgram(Command):
    """Leave this generation and run the new program: on trial, which `KeepProgram` ends, or for good. See `WorkerReady`."""

    program: int
    generation: int
    workers: tuple[WorkerId, ...]
    on_trial: bool


class KeepProgram(Command):
    """Workers that try this program keep it, as it is the job's; those that try another one return to it.

    `rejected`: the program that was on trial instead, and `why` it was rejected.
    """

    program: int
    workers: tuple[WorkerId, ...]
    rejected: int = 0
    why: str = ""


class InterruptCell(Command):
    """Interrupt this cell on these workers: no client waits for it any more."""

    number: int
    workers: tuple[WorkerId, ...]


class CancelLeave(Command):
    """Train on: the members do not leave, nor stand still."""

    generation: int
    members: tuple[WorkerId, ...]


class AbortWorld(Command):
    """Shut down the connections of this generation and of earlier ones, and leave it."""

    generation: int
    members: tuple[WorkerId, ...]
    reason: str


class StopProgram(Command):
    """The job is over: workers that still run its program leave it, and `culprit` raises its own error.

    `writer` writes the last checkpoint; None: rank 0.
    """

    job: str
    workers: tuple[WorkerId, ...]
    reason: str
    culprit: WorkerId | None = None
    writer: WorkerId | None = None


class EndJob(Command):
    job: str
    outcome: str  # succeeded, failed or stopped
    reason: str
    members: tuple[WorkerId, ...]
    culprit: WorkerId | None = None


class Record(Command):
    """A line for the event log."""

    kind: str
    text: str
    host: str = ""
    worker: str = ""
    generation: int = 0


Commands = list[Command]
