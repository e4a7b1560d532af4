"""The driver's answers to the requests of its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from msgspec.structs import replace

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.errors import HostError, UsageError
from nbelastic.core.script_messages import Terms
from nbelastic.core.world import HostPhase, WorkerState, World
from nbelastic.driver import orders
from nbelastic.driver import requests as r
from nbelastic.driver.orders import execute_on_all, execute_setup
from nbelastic.driver.run import Run
from nbelastic.driver.saved import SavedJob
from nbelastic.driver.stacks import show_stacks
from nbelastic.driver.status import Status

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver


def answer(driver: Driver, request: r.AnyRequest, future: Future[Any]) -> None:
    """In the driver's thread: resolve `future`, now or later. Raises what is wrong with the request."""
    match request:
        case r.WaitForStart(least=least):
            driver.pending.resolve(future, lambda world: begun(world, least))
        case r.WaitForWorld(size=size):
            driver.pending.resolve(future, lambda _: _world_of(driver, size))
        case r.Submit(program=program):
            _submit(driver, program, future)
        case r.SubmitScript(script=script, terms=terms):
            _submit_script(driver, script, terms, future)
        case r.StopJob(job=job, by=by):
            present = driver.present_job
            if present and job in ("", present):
                _take_in(driver, m.JobStopRequested(present, f"stopped by {by}"), future)
            else:
                future.set_result(True)
        case r.Execute(source=source):
            _refuse_cells_during_a_job(driver)
            execute_on_all(driver.world, driver.fleet, driver.pending, source, future)
        case r.ExecuteSetup(key=key, source=source):
            _refuse_cells_during_a_job(driver)
            execute_setup(driver.fleet, driver.pending, key, source, future)
        case r.ClearSetup(key=key):
            known = [cell.key for cell in driver.world.setup]
            if key and key not in known:
                raise UsageError(f"there is no setup cell {key!r}; there are {', '.join(known) or 'none'}.")
            _take_in(driver, m.SetupCleared(key), future)
        case r.AddHost() | r.RemoveHost() | r.Scale() | r.Restart() | r.Press():
            _take_order(driver, request, future)
        case r.ShowStacks(timeout=timeout):
            if driver.world.active_script is not None:
                raise UsageError("a script's workers cannot be asked where they are: use py-spy.")
            show_stacks(
                driver.world,
                driver.fleet,
                driver.pending,
                status=lambda: driver.status,
                timeout=timeout,
                found=future,
            )
        case r.MakeConnectionFile(host=host):
            driver.scripts.invitations.make(host, future)
        case r.FindController():
            driver.pending.resolve(future, lambda _: _controller(driver))
        case r.Stop(by=by, within=within):
            driver.take_in(m.StopRequested(f"stopped by {by}", within))
            future.set_result(True)
        case r.Discover(source=source, arguments=arguments):
            driver.discover(source, arguments)
            future.set_result(True)
        case r.HostsFound(key=key, hosts=hosts, text=text, failed=failed):
            driver.found_by_client(key, hosts, text, failed=failed)
            future.set_result(True)
        case _:
            assert_never(request)


def _take_order(
    driver: Driver, order: r.AddHost | r.RemoveHost | r.Scale | r.Restart | r.Press, future: Future[Any]
) -> None:
    match order:
        case r.AddHost(host=host, by=by):
            _take_in(driver, orders.add_host(host, by).event, future)
        case r.RemoveHost(host=host, now=now, by=by):
            _take_in(driver, orders.remove_host(driver.world, host, now, by).event, future)
        case r.Scale(min=low, max=high, by=by):
            _take_in(driver, orders.scale(driver.world, low, high, True, by).event, future)
        case r.Restart(worker=worker, by=by):
            _take_in(driver, orders.restart(driver.world, worker, by).event, future)
        case r.Press(message=message, slots=slots, by=by):
            noted, record = driver.fleet.live.orders, driver.record
            orders.take(message, slots, by, world=driver.world, orders=noted, record=record, pending=driver.pending)
            future.set_result(True)


def ready_workers(world: World) -> int:
    """How many workers can take code."""
    return sum(worker.state is WorkerState.READY for worker in world.workers.values())


def begun(world: World, low: int) -> bool | None:
    """Whether `low` workers are ready. HostError if no host is left that could start one: each is named with its reason."""
    if ready_workers(world) >= low:
        return True
    hosts = world.hosts.values()
    if hosts and all(host.phase is HostPhase.LOST for host in hosts):
        raise HostError("no host could be started: " + "; ".join(f"{host.spec.name}: {host.reason}" for host in hosts))
    return None


def _controller(driver: Driver) -> r.ControllerFound | None:
    information = driver.fleet.information
    return r.ControllerFound(information, tuple(driver.fleet.engines.values())) if information is not None else None


def _take_in(driver: Driver, event: m.Event, future: Future[Any]) -> None:
    """Answer when the event has been decided on: from then on the status shows it."""
    driver.pending.resolve_after(event, future, lambda _: True)


def _world_of(driver: Driver, size: int) -> Status | None:
    if driver.world.active_script is not None:
        status = driver.status
        return status if status.phase == "running" and status.world_size == size else None
    if driver.world.active is None:
        return driver.status if ready_workers(driver.world) == size else None
    return driver.status if driver.world.phase == "running" and driver.status.world_size == size else None


def _refuse_cells_during_a_job(driver: Driver) -> None:
    if driver.present_job:
        raise UsageError(f"{driver.present_job} is running: cells run between jobs.")


def _next_job(driver: Driver) -> str:
    r.refuse_second_job(driver.present_job)
    return f"job-{driver.submitted + 1}"


def _submit(driver: Driver, program: wire.Program, future: Future[Any]) -> None:
    job = _next_job(driver)
    with _saving(driver, job):
        program = replace(program, job=job, call=_named(program.call, job))
        run = Run(job, program)
        try:
            driver.submit(run, SavedJob(job, program))
        except OSError:
            run.forget_program()  # it would take the room that the next try needs
            raise

    _answer_when_begun(driver, run, future)


def _answer_when_begun(driver: Driver, run: Run, future: Future[Any]) -> None:
    def begun(world: World) -> str | None:
        return run.name if world.present_job == run.name or run.future.done() else None

    driver.pending.resolve(future, begun)


def _named(call: wire.Blob | None, job: str) -> wire.Blob | None:
    """The file of a call gets the job's name."""
    if call is None or not call.path:
        return call
    return replace(call, path=str(Path(call.path).rename(Path(call.path).with_name(f"{job}.program"))))


def _submit_script(driver: Driver, script: wire.Script, terms: Terms, future: Future[Any]) -> None:
    job = _next_job(driver)
    run = Run(job, None)
    with _saving(driver, job):
        driver.submit(run, SavedJob(job, script=(replace(script, job=job), terms)))
    _answer_when_begun(driver, run, future)


@contextlib.contextmanager
def _saving(driver: Driver, job: str) -> Iterator[None]:
    """No job is taken in that cannot be saved."""
    try:
        yield
    except OSError as error:
        raise r.not_saved(job, driver.settings.run_dir, error) from None
