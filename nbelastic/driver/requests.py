"""What a notebook asks of the driver, and the driver's answers. Each request has one answer, or one error."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.errors import UsageError
from nbelastic.core.group import Terms
from nbelastic.driver import orders
from nbelastic.driver.orders import execute_on_all, execute_setup
from nbelastic.driver.run import Run
from nbelastic.driver.saved import SavedJob
from nbelastic.driver.stacks import show_stacks
from nbelastic.driver.status import Status

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver


class Request(Struct, frozen=True, tag=True):
    """Something that somebody asks for. `by` says who, in words, where others see it."""


class WaitForStart(Request):
    """Answered when `least` workers are ready. HostError if no host is left that could start one."""

    least: int


class WaitForWorld(Request):
    """Answered with the Status when `size` workers run in one world or, without a job, are ready."""

    size: int


class Submit(Request):
    """Run a program. Answered with the job's name, when the job has begun (and is saved, in a kept cluster)."""

    program: wire.Program


class SubmitScript(Request):
    """The same for a script."""

    script: wire.Script
    terms: Terms


class StopJob(Request):
    """End the job of this name or, without one, the job that runs, if there is any."""

    by: str
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


class AddHost(Request):
    """Start workers there."""

    host: m.HostSpec
    by: str


class RemoveHost(Request):
    """Its workers leave at the next commit; `now`: at once."""

    host: str
    now: bool
    by: str


class Scale(Request):
    """Change the bounds of the world size; what is None stays."""

    min: int | None
    max: int | None
    by: str


class Restart(Request):
    """Start another process in the place of this worker's."""

    worker: str
    by: str


class Press(Request):
    """A button's message. What becomes of it is in the status; it is answered at once. `slots`: of a host without a number."""

    message: dict[str, Any]
    slots: int
    by: str


class ShowStacks(Request):
    """Answered with a list of `WorkerStack`, after `timeout` seconds at most."""

    timeout: float


class MakeConnectionFile(Request):
    """Answered with the path of a cluster file for terminals of this machine or, with a `host`, of that one."""

    host: m.HostSpec | None


class FindController(Request):
    """Answered with what an ipyparallel client needs to come to the controller, when that is up."""


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
)


def answer(driver: Driver, request: AnyRequest, future: Future[Any]) -> None:
    """In the driver's thread: resolve `future`, now or later. Raises what is wrong with the request."""
    match request:
        case WaitForStart(least=least):
            driver.watch(lambda d: d.begun(least), future)
        case WaitForWorld(size=size):
            driver.watch(lambda d: _world_of(d, size), future)
        case Submit(program=program):
            _submit(driver, program, future)
        case SubmitScript(script=script, terms=terms):
            _submit_script(driver, script, terms, future)
        case StopJob(job=job, by=by):
            present = driver.present_job
            if present and job in ("", present):
                _take_in(driver, m.JobStopRequested(present, f"stopped by {by}"), future)
            else:
                future.set_result(True)
        case Execute(source=source):
            _refuse_cells_during_a_job(driver)
            execute_on_all(driver, source, future)
        case ExecuteSetup(key=key, source=source):
            _refuse_cells_during_a_job(driver)
            execute_setup(driver, key, source, future)
        case ClearSetup(key=key):
            known = [cell.key for cell in driver.world.setup]
            if key and key not in known:
                raise UsageError(f"there is no setup cell {key!r}; there are {', '.join(known) or 'none'}.")
            _take_in(driver, m.SetupCleared(key), future)
        case AddHost(host=host, by=by):
            _take_in(driver, orders.add_host(host, by).event, future)
        case RemoveHost(host=host, now=now, by=by):
            there = dict.fromkeys([*driver.world.hosts, *driver.scripts.guests])
            _take_in(driver, orders.remove_host(there, host, now, by).event, future)
        case Scale(min=low, max=high, by=by):
            _take_in(driver, orders.scale(driver.world, low, high, True, by).event, future)
        case Restart(worker=worker, by=by):
            driver.scripts.refuse_to_restart()
            _take_in(driver, orders.restart(driver.world, worker, by).event, future)
        case Press(message=message, slots=slots, by=by):
            orders.take(driver, message, slots, by)
            future.set_result(True)
        case ShowStacks(timeout=timeout):
            if driver.scripts.active is not None:
                raise UsageError("a script's workers cannot be asked where they are: use py-spy.")
            show_stacks(driver, timeout, future)
        case MakeConnectionFile(host=host):
            driver.scripts.invitations.make(host, future)
        case FindController():
            driver.watch(lambda d: d.fleet.information, future)
        case _:
            assert_never(request)


def _take_in(driver: Driver, event: m.Event, future: Future[Any]) -> None:
    """Answer when the event has been decided on: from then on the status shows it."""
    driver.ask(event, lambda _: True, future)


def _world_of(driver: Driver, size: int) -> Status | None:
    if driver.scripts.active is not None:
        status = driver.status
        return status if status.phase == "running" and status.world_size == size else None
    if driver.world.active is None:
        return driver.status if driver.ready_workers() == size else None
    return driver.status if driver.world.phase == "running" and driver.status.world_size == size else None


def _refuse_cells_during_a_job(driver: Driver) -> None:
    if driver.present_job:
        raise UsageError(f"{driver.present_job} is running: cells run between jobs.")


def refuse_second_job(present: str) -> None:
    """UsageError if this job, empty if there is none, still runs."""
    if present:
        raise UsageError(f"{present} is still running: wait for it or stop it first.")


def not_saved(job: str, folder: Path, error: OSError) -> UsageError:
    """There is no room for a job."""
    where = f"{folder} ({error.strerror})"
    return UsageError(f"{job} cannot be saved in {where}: free some space there, then run it again.")


def _next_job(driver: Driver) -> str:
    refuse_second_job(driver.present_job)
    return f"job-{driver.submitted + 1}"


def _submit(driver: Driver, program: wire.Program, future: Future[Any]) -> None:
    job = _next_job(driver)
    program = replace(program, job=job, call=_named(program.call, job))
    run = Run(job, program)
    with _saving(driver, job):
        driver.submit(run, SavedJob(job, program))

    def begun(driver: Driver) -> str | None:
        there = driver.world.job is not None and driver.world.job.name == job
        return job if there or run.future.done() else None

    driver.watch(begun, future)


def _named(call: wire.Blob | None, job: str) -> wire.Blob | None:
    """The file of a call gets the job's name."""
    if call is None or not call.path:
        return call
    return replace(call, path=str(Path(call.path).rename(Path(call.path).with_name(f"{job}.program"))))


def _submit_script(driver: Driver, script: wire.Script, terms: Terms, future: Future[Any]) -> None:
    job = _next_job(driver)
    with _saving(driver, job):
        driver.scripts.submit(Run(job, None), replace(script, job=job), terms)
    future.set_result(job)


@contextlib.contextmanager
def _saving(driver: Driver, job: str) -> Iterator[None]:
    """A kept cluster takes in no job that it cannot save."""
    try:
        yield
    except OSError as error:
        raise not_saved(job, driver.settings.run_dir, error) from None
