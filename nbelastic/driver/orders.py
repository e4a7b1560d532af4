"""Orders of people: what they ask the driver for, and how it is told that they have been carried out.

Each order is an event and a question. The question is asked of the driver after each event from then on: a text when it
is done, None while it is under way, an NbelasticError if it will not be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.holders import alone_holds_state
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.driver.agents import Fleet
from nbelastic.driver.pending import Pending
from nbelastic.errors import ClusterStoppedError, HostError, NbelasticError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.cells import Executed, row
from nbelastic.protocol.hosts import parse_host
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.settings import check_bounds
from nbelastic.protocol.status import OrderStatus

KEPT = 8  # orders that are shown
PENDING = 32  # that may be under way: a page that has gone wild is not let in
ID_BOUND = 64  # characters of an order's id
_numbers = itertools.count(1)  # of orders without an id


class Order(NamedTuple):
    """`text` says it in words."""

    text: str
    event: ev.Event
    done: Callable[[ClusterState], str | None]


def add_host(spec: HostSpec, by: str) -> Order:
    """Done when it is up. HostError, later, if it cannot be started."""

    def done(cluster: ClusterState) -> str | None:
        there = cluster.hosts.get(spec.name)
        if there is None:
            raise HostError(f"{spec.name} has left again.")
        if there.phase is HostPhase.LOST:
            raise HostError(f"{there.reason}; it is tried again.")
        return f"up with {spec.slots} slot{'s' if spec.slots > 1 else ''}" if there.phase is HostPhase.UP else None

    return Order(f"add {spec.name}:{spec.slots}", ev.HostAdded(spec, by), done)


def remove_host(cluster: ClusterState, host: str, now: bool, by: str) -> Order:
    """Done when it has left. UsageError if there is none of this name."""
    known = [*cluster.hosts, *cluster.external_nodes]
    if host not in known:
        raise UsageError(f"there is no host {host!r}; the hosts are {', '.join(known) or 'none'}.")

    def done(cluster: ClusterState) -> str | None:
        there = cluster.hosts.get(host)
        if there is not None and there.phase is not HostPhase.DRAINING:
            raise HostError(f"{host} was added again.")
        return None if there is not None or host in cluster.external_nodes else "it has left"

    return Order(f"remove {host}{' now' if now else ''}", ev.HostRemoved(host, now, by), done)


def restart(cluster: ClusterState, worker: str, by: str) -> Order:
    """Done when another process is in its place. UsageError if there is no such worker, or if it alone has the state."""
    if cluster.active_script is not None:
        raise UsageError(f"{cluster.active_script.job} is a script: its workers only begin again together.")
    known = {str(w): w for w in cluster.workers if w not in cluster.stopped}
    if worker not in known:
        raise UsageError(f"there is no worker {worker!r}; the workers are {', '.join(known) or 'none'}.")
    w = known[worker]
    if alone_holds_state(cluster, w):
        raise UsageError(f"{worker} alone holds the training state, which would be lost: add a host first.")

    def done(cluster: ClusterState) -> str | None:
        there = cluster.workers
        if w in there and w not in cluster.stopped:
            raise UsageError(f"{worker} alone holds the training state.")
        new = next((other for other in there if (other.host, other.slot) == (w.host, w.slot) and other != w), None)
        if new is not None and there[new].state is WorkerState.STARTING:
            return None
        return f"{new} is in its place" if new is not None else "it has ended"

    return Order(f"restart {worker}", ev.RestartRequested(w, by), done)


def scale(cluster: ClusterState, low: int | None, high: int | None, keep_max: bool, by: str) -> Order:
    """Done at once. What is None stays, but for `high` unless `keep_max`: then there is no limit. UsageError for wrong bounds."""
    least = cluster.limits.min if low is None else low
    most = cluster.limits.max if high is None and keep_max else high
    check_bounds(least, most)
    limit = "no max" if most is None else f"max {most}"
    return Order(f"scale to min {least}, {limit}", ev.Scaled(least, most, by), lambda _: "")


def stop_job(cluster: ClusterState, by: str) -> Order:
    """Done when it has ended. UsageError if none runs."""
    job = cluster.present_job
    if not job:
        raise UsageError("no job is running.")

    def done(cluster: ClusterState) -> str | None:
        return None if cluster.present_job == job else f"{job} has ended"

    return Order(f"stop {job}", ev.JobStopRequested(job, f"stopped by {by}"), done)


def stop(by: str) -> Order:
    """Done when the driver ends."""
    return Order("stop the cluster", ev.StopRequested(f"stopped by {by}"), lambda _: None)


def read(message: Mapping[str, Any], cluster: ClusterState, default_slots: int, by: str) -> Order:
    """The order that a button's message is. UsageError for what is none, or cannot be."""
    match dict(message):
        case {"order": "add_host", "host": str(host)}:
            return add_host(parse_host(host, default_slots), by)
        case {"order": "remove_host", "host": str(host), **rest}:
            return remove_host(cluster, host, rest.get("now") is True, by)
        case {"order": "restart", "worker": str(worker)}:
            return restart(cluster, worker, by)
        case {"order": "scale", **rest}:
            low, high = rest.get("min"), rest.get("max")
            if not all(bound is None or type(bound) is int for bound in (low, high)):
                raise UsageError("min and max must be whole numbers.")
            return scale(cluster, low, high, "max" not in rest, by)
        case {"order": "stop_job"}:
            return stop_job(cluster, by)
        case {"order": "stop"}:
            return stop(by)
        case _:
            raise UsageError("this is no order.")


def take(
    message: Mapping[str, Any],
    default_slots: int,
    by: str,
    *,
    cluster: ClusterState,
    orders: list[OrderStatus],
    record: Callable[[cmd.Record], None],
    pending: Pending,
) -> None:
    """In the driver's thread: carry out what a button's message asks for, and note in `orders` what becomes of it."""
    key = str(message.get("id", ""))[:ID_BOUND] or f"order-{next(_numbers)}"

    def settle(word: str, why: str) -> None:
        for i, each in enumerate(orders):
            if each.id == key:
                orders[i] = replace(each, word=word, why=why)

    def refuse(error: BaseException) -> None:
        record(cmd.Record("order-refused", f"{by}: {error}"))
        settle("refused", str(error))

    def settled(future: Future[str]) -> None:
        error = future.exception()
        if error is None:
            settle("done", future.result())
        elif not isinstance(error, ClusterStoppedError):
            refuse(error)
        elif message["order"] == "stop":
            settle("done", "")
        else:  # the log is closed
            settle("refused", str(error))

    try:
        ends = message.get("order") in ("stop", "stop_job")
        if not ends and sum(each.word == "under way" for each in orders) >= PENDING:
            raise UsageError(f"{PENDING} orders are under way already: wait for one to be done.")
        order = read(message, cluster, default_slots, by)
    except NbelasticError as error:
        orders.append(OrderStatus(key, by, str(message.get("order", "")).replace("_", " ")[:ID_BOUND]))
        refuse(error)
    else:
        orders.append(OrderStatus(key, by, order.text))
        future: Future[str] = Future()
        future.add_done_callback(settled)
        pending.resolve_after(order.event, future, order.done)
    ended = [each for each in orders if each.word != "under way"]
    for each in ended[: max(0, len(orders) - KEPT)]:
        orders.remove(each)
    pending.check_and_publish()


def execute_on_all(
    cluster: ClusterState, fleet: Fleet, pending: Pending, source: str, results: Future[list[Executed]]
) -> None:
    """In the driver's thread: run a cell on every ready worker; resolve `results` when all have answered or gone."""
    waiting = {w for w, worker in cluster.workers.items() if worker.state is WorkerState.READY}
    answers: dict[WorkerId, Executed] = {}

    def settle(cluster: ClusterState) -> list[Executed] | None:
        there = [w for w in waiting if w in cluster.workers]
        return _rows(waiting, answers) if all(w in answers for w in there) else None

    for w in waiting:

        def done(result: worker_messages.CellResult, w: WorkerId = w) -> None:
            answers[w] = row(result)
            pending.check_and_publish()

        fleet.execute(w, source, done)
    pending.resolve(results, settle)


def execute_setup(fleet: Fleet, pending: Pending, key: str, source: str, results: Future[list[Executed]]) -> None:
    """In the driver's thread: try a setup cell; resolve `results` when its trial is over. UsageError if it cannot begin."""
    version = time.time_ns()  # no other has it, under no driver
    answers = fleet.setup_rows[version] = {}
    tried: set[WorkerId] = set()

    def settle(cluster: ClusterState) -> list[Executed] | None:
        trial = cluster.trial
        if trial is not None and trial.cell.version == version:
            tried.update(trial.running)
            return None
        if not tried and not any(cell.version == version for cell in cluster.setup):
            raise UsageError(
                "another setup cell or a job is still running: wait until it ends, or restart the worker that does not end it."
            )
        return _rows(tried, answers)

    results.add_done_callback(lambda _: fleet.setup_rows.pop(version, None))
    pending.resolve_after(ev.SetupSubmitted(key, source, version), results, settle)


def _rows(workers: Iterable[WorkerId], answers: Mapping[WorkerId, Executed]) -> list[Executed]:
    gone = "the worker died while the cell ran"
    return [answers.get(w, (str(w), "", "", gone)) for w in sorted(workers)]
