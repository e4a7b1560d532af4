"""What clients ask of the driver: notebooks and terminals. Each request has one answer, or one error."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from nbelastic.errors import UsageError
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol.cells import Executed
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.script_events import Terms
from nbelastic.protocol.sources import Source
from nbelastic.protocol.status import Status, WorkerStack


class Request(Struct, frozen=True, tag=True):
    """Something that somebody asks for."""


class Order(Request):
    """A request that changes what others see. `by` says who gives it, in words, where they see it."""

    by: str


class WaitForStart(Request):
    """Answered when `least` workers are ready. HostError if no host is left that could start one."""

    least: int


class WaitForWorld(Request):
    """Answered with the Status when `size` workers run in one world or, without a job, are ready."""

    size: int


class Submit(Request):
    """Run a program. Answered with the job's name, when the job has begun and is saved."""

    program: worker_messages.Program


class SubmitScript(Request):
    """The same for a script."""

    script: agent_messages.Script
    terms: Terms


class StopJob(Order):
    """End the job of this name or, without one, the job that runs, if there is any."""

    job: str = ""


class Execute(Request):
    """Run a cell on every ready worker. Answered with a list of `Executed`, when all have."""

    source: str


class ExecuteSetup(Request):
    """The same for a setup cell, which later workers run as well."""

    key: str
    source: str


class ClearSetup(Request):
    """Forget the setup cell with this key or, without one, all."""

    key: str = ""


class AddHost(Order):
    """Start workers there."""

    host: HostSpec


class RemoveHost(Order):
    """Its workers leave at the next commit; `now`: at once."""

    host: str
    now: bool


class Scale(Order):
    """Change the bounds of the world size; what is None stays."""

    min: int | None
    max: int | None


class Restart(Order):
    """Start another process in the place of this worker's."""

    worker: str


class Stop(Order):
    """Stop the cluster: programs have `within` seconds (None: `stop_timeout`) to end. Answered at once."""

    within: float | None = None


class HostsFound(Request):
    """The discovery `key`, in a kernel, has found these `hosts`; None: it has failed, or answers again: `text` says so.

    It is not heard once hosts come from elsewhere.
    """

    key: str
    hosts: tuple[HostSpec, ...] | None
    text: str = ""
    failed: bool = False


class Discover(Request):
    """Ask from now on there where hosts come from. `arguments`: those of `Cluster` with it, as they are kept."""

    source: Source
    arguments: dict[str, Any]


class Press(Order):
    """A button's message. What becomes of it is in the status; it is answered at once. `slots`: of a host without a number."""

    message: dict[str, Any]
    slots: int


class ShowStacks(Request):
    """Answered with a list of `WorkerStack`, after `timeout` seconds at most."""

    timeout: float


class MakeConnectionFile(Request):
    """Answered with the path of a cluster file for terminals of this machine or, with a `host`, of that one."""

    host: HostSpec | None


class FindController(Request):
    """Answered with a `ControllerFound`, when ipyparallel's controller is up."""


class ControllerFound(Struct, frozen=True):
    """What an ipyparallel client needs to come to the controller, and the engines that it will meet there, by their uuids."""

    information: dict[str, Any]
    engines: tuple[str, ...]


AnyRequest = (
    WaitForStart
    | WaitForWorld
    | Submit
    | SubmitScript
    | StopJob
    | Execute
    | ExecuteSetup
    | ClearSetup
    | AddHost
    | RemoveHost
    | Scale
    | Restart
    | Press
    | ShowStacks
    | MakeConnectionFile
    | FindController
    | Stop
    | HostsFound
    | Discover
)

# May be asked again of the next driver, if one dies before it answers: it makes no difference to have asked twice.
REPEATABLE = (
    *(WaitForStart, WaitForWorld, ShowStacks, MakeConnectionFile, FindController),
    *(AddHost, Scale, StopJob, Discover),
)

ANSWERS: dict[type[Request], Any] = {  # of which type the answer is; of the others: text, or only that there is one
    WaitForWorld: Status,
    Execute: list[Executed],
    ExecuteSetup: list[Executed],
    ShowStacks: list[WorkerStack],
    FindController: ControllerFound,
}


def refuse_second_job(present: str) -> None:
    """UsageError if this job, empty if there is none, still runs."""
    if present:
        raise UsageError(f"{present} is still running: wait for it or stop it first.")


def not_saved(job: str, folder: Path, error: OSError) -> UsageError:
    """There is no room for a job."""
    where = f"{folder} ({error.strerror})"
    return UsageError(f"{job} cannot be saved in {where}: free some space there, then run it again.")
