"""Changes of the cluster that a user requests, and the outcome of those requested with the dashboard's buttons."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, HostPhase, WorkerState
from nbelastic.core.state_holders import alone_holds_state
from nbelastic.driver.pending import Pending
from nbelastic.errors import ClusterStoppedError, HostError, NbelasticError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.requests import DashboardAction
from nbelastic.protocol.settings import check_bounds
from nbelastic.protocol.status import RequestStatus
from nbelastic.system.argument_types import check_time_left

SHOWN = 8  # requests that the status shows
MAX_UNDER_WAY = 32  # protects the driver from a page that sends requests without end
MAX_ID_LENGTH = 64  # characters
_numbers = itertools.count(1)  # for requests without an id


class ChangeRequest(NamedTuple):
    """A change in words, the event that requests it, and its outcome.

    `outcome(cluster)` is evaluated after each event: a text when the change is done, None while it is under way. It raises an
    NbelasticError if the change will not be made.
    """

    text: str
    event: ev.Event
    outcome: Callable[[ClusterState], str | None]


def add_host(spec: HostSpec, by: str) -> ChangeRequest:
    """Done when the host is up. The outcome is a HostError if it cannot be started."""

    def outcome(cluster: ClusterState) -> str | None:
        host = cluster.hosts.get(spec.name)
        if host is None:
            raise HostError(f"{spec.name} has left again.")
        if host.phase is HostPhase.LOST:
            raise HostError(f"{host.reason}; it is tried again.")
        return f"up with {spec.slots} slot{'s' if spec.slots > 1 else ''}" if host.phase is HostPhase.UP else None

    return ChangeRequest(f"add {spec.name}:{spec.slots}", ev.HostAdded(spec, by), outcome)


def remove_host(cluster: ClusterState, host: str, now: bool, by: str, within: float | None = None) -> ChangeRequest:
    """Done when the host has left. UsageError if there is no host of this name."""
    if within is not None:
        check_time_left("within", within)
    known = [*cluster.hosts, *cluster.external_nodes]
    if host not in known:
        raise UsageError(f"there is no host {host!r}; the hosts are {', '.join(known) or 'none'}.")

    def outcome(cluster: ClusterState) -> str | None:
        present = cluster.hosts.get(host)
        if present is not None and present.phase is not HostPhase.DRAINING:
            raise HostError(f"{host} was added again.")
        return None if present is not None or host in cluster.external_nodes else "it has left"

    return ChangeRequest(f"remove {host}{' now' if now else ''}", ev.HostRemoved(host, now, by, within), outcome)


def restart_worker(cluster: ClusterState, worker: str, by: str) -> ChangeRequest:
    """Done when another process runs in the worker's slot.

    UsageError if there is no such worker, or if it is the only one that holds the training state.
    """
    if cluster.active_script is not None:
        raise UsageError(f"{cluster.active_script.job} is a script: its workers only restart together.")
    known = {str(w): w for w in cluster.workers if w not in cluster.stopped}
    if worker not in known:
        raise UsageError(f"there is no worker {worker!r}; the workers are {', '.join(known) or 'none'}.")
    w = known[worker]
    if alone_holds_state(cluster, w):
        raise UsageError(f"{worker} alone holds the training state, which would be lost: add a host first.")

    def outcome(cluster: ClusterState) -> str | None:
        workers = cluster.workers
        if w in workers and w not in cluster.stopped:
            raise UsageError(f"{worker} alone holds the training state.")
        new = next((other for other in workers if (other.host, other.slot) == (w.host, w.slot) and other != w), None)
        if new is not None and workers[new].state is WorkerState.STARTING:
            return None
        return f"{new} has replaced it" if new is not None else "it has ended"

    return ChangeRequest(f"restart {worker}", ev.RestartRequested(w, by), outcome)


def scale(cluster: ClusterState, low: int | None, high: int | None, keep_max: bool, by: str) -> ChangeRequest:
    """Done at once. UsageError for wrong bounds.

    `low=None` keeps the present minimum. `high=None` removes the maximum, or keeps it with `keep_max`.
    """
    least = cluster.limits.min if low is None else low
    most = cluster.limits.max if high is None and keep_max else high
    check_bounds(least, most)
    limit = "no max" if most is None else f"max {most}"
    return ChangeRequest(f"scale to min {least}, {limit}", ev.Scaled(least, most, by), lambda _: "")


def pause(cluster: ClusterState, by: str) -> ChangeRequest:
    """Done when all ranks stand still. UsageError if there is no training, or if it ends or is resumed before."""
    check_trains(cluster)
    return ChangeRequest("pause", ev.PauseRequested(by), is_paused)


def resume(cluster: ClusterState, by: str) -> ChangeRequest:
    """Done at once. UsageError if there is no training."""
    check_trains(cluster)
    return ChangeRequest("resume", ev.ResumeRequested(by), lambda _: "")


def check_trains(cluster: ClusterState) -> None:
    """UsageError without a job that makes commits."""
    if cluster.active is None:
        if cluster.present_job:
            raise UsageError("a script makes no commits, so there is no commit to stop at.")
        raise UsageError("no job is running, so there is no commit to stop at: run a program first.")


def is_paused(cluster: ClusterState) -> str | None:
    """The outcome of a pause."""
    if not cluster.halt.paused_by:
        raise UsageError("the training has ended, or was resumed, before it came to the next commit.")
    is_over = cluster.phase == "paused" and not (cluster.halt.steps or cluster.halt.steps_to)
    return f"paused at commit {cluster.halt.commit} of generation {cluster.generation}" if is_over else None


def stop_job(cluster: ClusterState, by: str) -> ChangeRequest:
    """Done when the job has ended. UsageError if no job is running."""
    job = cluster.present_job
    if not job:
        raise UsageError("no job is running.")

    def outcome(cluster: ClusterState) -> str | None:
        return None if cluster.present_job == job else f"{job} has ended"

    return ChangeRequest(f"stop {job}", ev.JobStopRequested(job, f"stopped by {by}"), outcome)


def stop_cluster(by: str) -> ChangeRequest:
    """Done when the driver ends."""
    return ChangeRequest("stop the cluster", ev.StopRequested(f"stopped by {by}"), lambda _: None)


def parse(action: DashboardAction, cluster: ClusterState, by: str) -> ChangeRequest:
    """The change that a button's message requests. UsageError for an unknown or impossible one."""
    match action.message:
        case {"order": "add_host", "host": str(host)}:
            return add_host(parse_host(host, action.slots, follow_gpus=action.follow_gpus), by)
        case {"order": "remove_host", "host": str(host), **rest}:
            return remove_host(cluster, host, rest.get("now") is True, by)
        case {"order": "restart", "worker": str(worker)}:
            return restart_worker(cluster, worker, by)
        case {"order": "scale", **rest}:
            low, high = rest.get("min"), rest.get("max")
            if not all(bound is None or type(bound) is int for bound in (low, high)):
                raise UsageError("min and max must be whole numbers.")
            return scale(cluster, low, high, "max" not in rest, by)
        case {"order": "pause"}:
            return pause(cluster, by)
        case {"order": "resume"}:
            return resume(cluster, by)
        case {"order": "stop_job"}:
            return stop_job(cluster, by)
        case {"order": "stop"}:
            return stop_cluster(by)
        case _:
            raise UsageError("unknown request, or its arguments are invalid.")


def request_by_button(
    action: DashboardAction,
    by: str,
    *,
    cluster: ClusterState,
    shown: list[RequestStatus],
    record: Callable[[cmd.Record], None],
    pending: Pending,
) -> None:
    """Request the change of a button's message, and keep its outcome in `shown`. Runs in the driver's thread."""
    message = action.message
    key = str(message.get("id", ""))[:MAX_ID_LENGTH] or f"order-{next(_numbers)}"

    def set_outcome(word: str, why: str) -> None:
        for i, each in enumerate(shown):
            if each.id == key:
                shown[i] = replace(each, word=word, why=why)

    def refuse(error: BaseException) -> None:
        record(cmd.Record("order-refused", f"{by}: {error}"))
        set_outcome("refused", str(error))

    def on_resolved(future: Future[str]) -> None:
        error = future.exception()
        if error is None:
            set_outcome("done", future.result())
        elif not isinstance(error, ClusterStoppedError):
            refuse(error)
        elif message["order"] == "stop":
            set_outcome("done", "")
        else:  # the event log is closed
            set_outcome("refused", str(error))

    try:
        stops = message.get("order") in ("stop", "stop_job")
        if not stops and sum(each.word == "under way" for each in shown) >= MAX_UNDER_WAY:
            raise UsageError(f"{MAX_UNDER_WAY} requests are under way already: wait until one is done.")
        request = parse(action, cluster, by)
    except NbelasticError as error:
        shown.append(RequestStatus(key, by, str(message.get("order", "")).replace("_", " ")[:MAX_ID_LENGTH]))
        refuse(error)
    else:
        shown.append(RequestStatus(key, by, request.text))
        future: Future[str] = Future()
        future.add_done_callback(on_resolved)
        pending.resolve_after(request.event, future, request.outcome)
    ended = [each for each in shown if each.word != "under way"]
    for each in ended[: max(0, len(shown) - SHOWN)]:
        shown.remove(each)
    pending.check_and_publish()
