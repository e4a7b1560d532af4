"""Commands, in the imperative: what the core decides on. Their results come back as events."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from msgspec import Struct

from nbelastic.protocol.ids import HostSpec, WorkerId


class Command(Struct, frozen=True, tag=True):
    """Something to be done. Its result comes back as an event."""


class StartAgent(Command):
    host: HostSpec


class StopAgent(Command):
    host: str


class Probe(Command):
    """The agent of `host` is to find out at which of these addresses the prober of `target` answers: see `Probed`."""

    host: str
    target: str
    addresses: tuple[str, ...]
    port: int
    number: int


class Rehome(Command):
    """From now on this host's workers use `address`, of `interface`: those to be started, and those that live.

    Who lives keeps the connections of its generation. It offers a new store at the new address: at once, by `WorkerReady` again
    if it waits for a world and by `StoreOffered` if it trains.
    """

    host: str
    address: str
    interface: str


class QueryPosition(Command):
    """The world stands still, or others wait for them: ask these members where they are. Each answers with `PositionReported`."""

    generation: int
    members: tuple[WorkerId, ...]


class StartWorker(Command):
    worker: WorkerId


class StopWorker(Command):
    """`kill`: at once and without asking."""

    worker: WorkerId
    kill: bool = False


class EndHungWorker(Command):
    """The answer to `WorkerHung` and `StateKept`: it ends itself. `keep`: it first writes the training state to its host's disk."""

    worker: WorkerId
    keep: bool = False


class LoadKeptState(Command):
    """Read the state of this `commit` that the worker `by` has kept on this host, and then say `WorkerReady` again."""

    worker: WorkerId
    by: WorkerId
    commit: int


class DeleteKeptState(Command):
    """What the worker `by` has kept on its host is not needed any more."""

    by: WorkerId


class RunSetup(Command):
    """Its outcome comes back as `SetupEnded`."""

    worker: WorkerId
    version: int
    source: str


class RunProgram(Command):
    worker: WorkerId
    job: str


class FormWorld(Command):
    """`members` by rank; `root` is the rank whose state is the newest; `receivers` are the ranks that need it."""

    generation: int
    members: tuple[WorkerId, ...]
    store: str
    root: int
    receivers: tuple[int, ...]
    to: tuple[WorkerId, ...] = ()  # only these (again); empty: all members


class PrepareWorld(Command):
    """Build the process group of `order.generation` in the background; the order itself may follow."""

    order: FormWorld


class DropWorld(Command):
    """What was prepared as `generation` will not be: drop it, and leave it if you are in it already."""

    generation: int
    members: tuple[WorkerId, ...]


class AskLeave(Command):
    generation: int
    members: tuple[WorkerId, ...]
    number: int = 0


class LeaveAt(Command):
    generation: int
    commit: int
    members: tuple[WorkerId, ...]


class CancelLeave(Command):
    generation: int
    members: tuple[WorkerId, ...]


class AbortWorld(Command):
    generation: int
    members: tuple[WorkerId, ...]
    reason: str


class StopProgram(Command):
    """The job is over: those still in its program leave it, `culprit` with its own error."""

    job: str
    workers: tuple[WorkerId, ...]
    reason: str
    culprit: WorkerId | None = None


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
