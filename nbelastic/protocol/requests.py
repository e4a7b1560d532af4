"""What clients, which are notebooks and terminals, request from the driver. Each request gets one answer, or one error."""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from nbelastic.errors import UsageError
from nbelastic.protocol import agent_messages, cell_messages, messages, worker_messages
from nbelastic.protocol.chaos import FaultKind
from nbelastic.protocol.host_sources import Source
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.script_events import Terms
from nbelastic.protocol.status import Status, StepTimes, WorkerStack


class Request(Struct, frozen=True, tag=True):
    """Base of all requests."""


class ChangeRequest(Request):
    """Base of requests that the event log records. `by`: which client has sent it, in words."""

    by: str


class WaitForStart(Request):
    """Answer when `least` workers are ready. HostError when no remaining host could start one."""

    least: int


class WaitForWorld(Request):
    """Answer with the Status when `size` workers run in one world or, without a job, are ready, and have answered since."""

    size: int


class Submit(Request):
    """Run a program. Answer with the job's name when the job has begun and is saved."""

    program: worker_messages.Program


class SendCode(Request):
    """Have each host get this version of the user's modules, which is in the run folder. Answer when all have it that are up."""

    version: str


class CodeSent(Struct, frozen=True):
    """The hosts to which a version was sent. The others have the same files in the notebook's folders."""

    hosts: tuple[str, ...]


class Swap(ChangeRequest):
    """Replace the present job's program by this one at the next commit. Answer with a `SwapOutcome`."""

    program: worker_messages.Program


class SwapOutcome(Struct, frozen=True):
    """The new program has come to its first commit; or its `error`, and the old one goes on."""

    job: str
    notes: tuple[str, ...] = ()  # what it has not taken over
    error: str = ""
    rank: int | None = None  # that raised it
    worker: str = ""
    traceback: str = ""


class Debug(Request):
    """Answer with a `DebuggerPrompt` when a program waits at a breakpoint: on this `rank` (None: on any).

    With a `line`: give it to the program that waits for input `number`; answer when it waits again, or goes on.
    """

    rank: int | None = None
    number: int = 0
    line: str | None = None


class DebuggerPrompt(Struct, frozen=True):
    """The program of a worker waits for input `number` (0: it goes on), and has printed `text` with its debugger's prompt."""

    number: int
    worker: str
    rank: int | None = None
    text: str = ""


class SubmitScript(Request):
    """Run a script. Answer as for `Submit`."""

    script: agent_messages.Script
    terms: Terms


class StopJob(ChangeRequest):
    """Stop the job of this name; without a name, the present job, if there is one."""

    job: str = ""


class Execute(Request):
    """Run a cell on every ready worker. Answer with a list of `CellOutput` when all workers have run it, after `Piece`s.

    The cell is interrupted if the request is cancelled.
    """

    source: str


class ExecuteSetup(Request):
    """Run a setup cell, which later workers run, too. Answer as for `Execute`."""

    key: str
    source: str


class Push(Request):
    """Set these values in the namespace of every worker, also of later ones. Answer as for `Execute`."""

    pushed: messages.Pushed


class PullState(Request):
    """Answer with a `Blob` of the job's training state: a packed dict of values by name, or with `name` this value alone.

    Of a running job: as it is at the next commit. Of the last job: as its workers still hold it. The client removes the file.
    """

    job: str
    name: str = ""


class ExecuteAtCommit(Request):
    """Run a cell at the next commit of the present job, on these ranks (empty: on all). Answer with a list of `CommitOutput`.

    The cell is interrupted after `limit` seconds, and if the request is cancelled.
    """

    source: str
    ranks: tuple[int, ...] = ()
    limit: float = 30.0


class CommitOutput(Struct, frozen=True):
    """What a cell has printed and displayed on one rank at a commit. `displays`: MIME bundles with metadata, as JSON."""

    rank: int
    worker: str
    stdout: str
    stderr: str
    error: str | None  # its traceback
    displays: tuple[str, ...] = ()


class Pause(ChangeRequest):
    """Stop the training at its next commit, until `Resume`. Answer when all ranks stand still."""


class Resume(ChangeRequest):
    """Train on. Answer at once."""


class Step(ChangeRequest):
    """Make so many commits, and pause again. Answer when all ranks stand still."""

    steps: int


class Piece(Struct, frozen=True):
    """What a worker's cell has just printed to a stream ("out" or "err"), or a "display": a MIME bundle with metadata, as JSON.

    At a commit it has a `rank`, and a first piece without text from each rank that begins the cell.
    """

    worker: str
    kind: str
    text: str
    rank: int | None = None


CellOutput = tuple[str, str, str, str | None]  # worker, standard output, standard error, traceback


def cell_output(result: cell_messages.CellResult) -> CellOutput:
    return str(result.worker), result.stdout, result.stderr, result.traceback or None


class ClearSetup(Request):
    """Forget the setup cell with this key; without a key, all setup cells."""

    key: str = ""


class AddHost(ChangeRequest):
    """Add a host, and start workers on it."""

    host: HostSpec


class RemoveHost(ChangeRequest):
    """Remove a host after its workers have left at the next commit; `now`: at once. `within`: see `HostRemoved`."""

    host: str
    now: bool
    within: float | None = None


class Scale(ChangeRequest):
    """Change the bounds of the world size. None: leave this bound."""

    min: int | None
    max: int | None


class Restart(ChangeRequest):
    """Replace this worker's process."""

    worker: str


class RequestFault(ChangeRequest):
    """Inject a fault of one of these `kinds`: the one with this number. Answer with why none is possible now, or empty text.

    `seed`: chooses the kind and the victim. `below_min`: fewer workers than `min` may be left. `is_check`: inject nothing; a
    UsageError says why faults are not allowed.
    """

    kinds: tuple[FaultKind, ...]
    seed: int
    number: int = 0
    below_min: bool = False
    is_check: bool = False


class Stop(ChangeRequest):
    """Stop the cluster; programs must end `within` seconds (None: `stop_timeout`). Answer at once."""

    within: float | None = None


class HostsFound(Request):
    """A client's discovery has found these hosts; None: it has `failed`, or works again, as `text` says.

    The driver ignores it unless its source of hosts is the `ClientDiscovery` with this key.
    """

    key: str
    hosts: tuple[HostSpec, ...] | None
    text: str = ""
    failed: bool = False


class SetDiscovery(Request):
    """Use another source of hosts. `arguments`: those of `Cluster` with it, for the driver snapshot."""

    source: Source
    arguments: dict[str, Any]


class DashboardAction(ChangeRequest):
    """A dashboard's button. Answer at once; its result appears in the status.

    `slots`, `follow_gpus`: of a host without a number, as in `host_parsing.parse_host`.
    """

    message: dict[str, Any]
    slots: int
    follow_gpus: bool = False


class ShowStacks(Request):
    """Answer with a list of `WorkerStack`, after at most `timeout` seconds."""

    timeout: float


class ShowStepTimes(Request):
    """Answer with the `StepTimes` of the last minutes."""


class MakeConnectionFile(Request):
    """Answer with the path of a connection file for terminals of `host`; None: of the driver's machine."""

    host: HostSpec | None


class FindController(Request):
    """Answer with a `ControllerFound` when ipyparallel's controller runs and each ready worker is an engine or has failed.

    After `timeout` seconds workers that have not answered count as failed.
    """

    timeout: float


class ControllerFound(Struct, frozen=True):
    """What an ipyparallel client needs to connect to the controller. By worker: the uuids of engines, why others are not engines."""

    information: dict[str, Any]
    engines: dict[str, str]
    failed: dict[str, str]


AnyRequest = (
    WaitForStart
    | WaitForWorld
    | Submit
    | SendCode
    | Swap
    | Debug
    | SubmitScript
    | StopJob
    | Execute
    | ExecuteSetup
    | ExecuteAtCommit
    | Push
    | PullState
    | Pause
    | Resume
    | Step
    | ClearSetup
    | AddHost
    | RemoveHost
    | Scale
    | Restart
    | RequestFault
    | DashboardAction
    | ShowStacks
    | ShowStepTimes
    | MakeConnectionFile
    | FindController
    | Stop
    | HostsFound
    | SetDiscovery
)

OnPiece = Callable[[Piece], object]


def ignore_piece(_: Piece) -> None:
    """For a client that wants no pieces."""


# A client sends these again to the next driver if one dies before it answers: twice has the effect of once.
REPEATABLE = (
    *(WaitForStart, WaitForWorld, ShowStacks, ShowStepTimes, MakeConnectionFile, FindController, PullState, SendCode),
    *(AddHost, Scale, StopJob, SetDiscovery, Pause, Resume),
)

ANSWERS: dict[type[Request], Any] = {  # the type of the answer, unless it is text or None
    WaitForWorld: Status,
    Execute: list[CellOutput],
    ExecuteSetup: list[CellOutput],
    Push: list[CellOutput],
    PullState: messages.Blob,
    ExecuteAtCommit: list[CommitOutput],
    SendCode: CodeSent,
    Swap: SwapOutcome,
    Debug: DebuggerPrompt,
    ShowStacks: list[WorkerStack],
    ShowStepTimes: StepTimes,
    FindController: ControllerFound,
}


def refuse_second_job(present: str) -> None:
    """UsageError if the job of this name still runs; empty: there is none."""
    if present:
        raise UsageError(
            f"{present} is still running: wait for its end, or stop it (%elastic_stop --job). %%elastic_run --swap replaces "
            "the program of a job that runs."
        )


def refuse_push(present: str) -> None:
    """UsageError if the job of this name runs."""
    if present:
        raise UsageError(
            f"{present} is running: values are pushed between jobs. Change those of the running program with "
            "%%elastic_px --at-commit."
        )


def not_saved(job: str, folder: Path, error: OSError) -> UsageError:
    """The error for a job that the disk has no space for."""
    where = f"{folder} ({error.strerror})"
    return UsageError(f"{job} cannot be saved in {where}: free some space there, then run it again.")
