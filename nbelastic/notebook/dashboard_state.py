"""Makes the state of a dashboard view: a key frame, and the changes since then as a JSON Merge Patch (RFC 7386).

Pure functions of a `Status` and the last events. A view that is opened later receives both and needs nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nbelastic.client.job_summary import JobSummary, job_summary
from nbelastic.client.progress import is_whole
from nbelastic.client.trace import in_order
from nbelastic.notebook.dashboard_frames import (
    Checkpoints,
    ClusterView,
    Copies,
    Driver,
    Event,
    Gpu,
    Host,
    Summary,
    WorkerCopies,
    WorkerRow,
)
from nbelastic.notebook.status_text import slot_name
from nbelastic.protocol.status import (
    CheckpointStatus,
    CopiesStatus,
    DriverFacts,
    EventRecord,
    GpuStatus,
    HostStatus,
    Status,
    WorkerStatus,
)
from nbelastic.protocol.status import WorkerCopies as WorkerCopiesStatus

MAX_EVENTS = 12  # the newest events, which are part of the state
MAX_WHOLE = 8_000  # bytes of JSON up to which the state is always sent whole
MB = 1_000_000

Json = dict[str, Any]


class DashboardState:
    """The last key frame and the change since then. Not thread-safe."""

    def __init__(self) -> None:
        self.state: Json = {"n": 0}
        self.change: Json = {}
        self._shown: Mapping[str, Any] = {}
        self._whole = False
        self._size = 0  # bytes of JSON of the newest state that was measured: a large one is measured rarely
        self._summary: tuple[int, JobSummary | None] = 0, None  # of so many events

    def send_key_frame(self) -> None:
        """Make a key frame of the next update: a view has missed the last one."""
        self._shown = {}
        self._whole = True

    def update(
        self, status: Status, events: Sequence[EventRecord], count: int, driver: DriverFacts | None = None
    ) -> bool:
        """Take in the newest status; `events` are the newest of `count`. Return False if nothing has changed."""
        if count != self._summary[0]:
            self._summary = count, job_summary(events)
        view = key_frame(status, events, count, self._summary[1], driver)
        if view == self._shown:
            return False
        self._shown = view
        time = round(status.time, 3)
        change = merge_patch({name: value for name, value in self.state.items() if name not in ("n", "time")}, view)
        size = len(msgspec.json.encode(change))
        whole, self._whole = self._whole, False
        if whole or self._size <= MAX_WHOLE or size > self._size // 2:
            self._size = len(msgspec.json.encode(view))
            whole = whole or self._size <= MAX_WHOLE or size > self._size // 2
        if whole:
            self.state = {"n": self.state["n"] + 1, "time": time, **view}
            self.change = {}
        else:
            self.change = {"base": self.state["n"], "patch": {"time": time, **change}}
        return True


def key_frame(
    status: Status,
    events: Sequence[EventRecord],
    count: int,
    summary: JobSummary | None = None,
    driver: DriverFacts | None = None,
) -> ClusterView:
    """Return all that a view shows, except the time."""
    workers: dict[str, dict[str, WorkerRow]] = {host.name: {} for host in status.hosts}
    gpus = {host.name: {gpu.id: number for number, gpu in enumerate(host.gpus)} for host in status.hosts}
    copies: dict[str, dict[str, WorkerCopies]] = {}
    for worker in status.workers:
        place = worker.id[len(worker.host) + 1 :]
        workers.setdefault(worker.host, {})[place] = _worker(worker, gpus.get(worker.host, {}))
        if worker.copies is not None:
            copies.setdefault(worker.host, {})[place] = _worker_copies(worker.copies)
    shown = events[-MAX_EVENTS:]
    return {
        "name": status.name,
        "phase": status.phase,
        "reason": status.reason,
        "generation": status.generation,
        "world_size": status.world_size,
        "min": status.min,
        "max": status.max,
        "job": status.job,
        "outcome": status.outcome,
        "step": status.step,
        "total": status.total,
        "steps_per_second": None if status.steps_per_second is None else five_digits(status.steps_per_second),
        "report": {name: _rounded(value) for name, value in status.report.items()},
        "failed_at": status.failed_at,
        "copies": None if status.copies is None else _copies(status.copies),
        "checkpoints": None if status.checkpoint is None else _checkpoints(status.checkpoint),
        "summary": None if summary is None else _summary(summary, status.time),
        "driver": None if driver is None else _driver(driver),
        "hosts": {
            host.name: _host(host, workers[host.name], copies.get(host.name, {}), status.time) for host in status.hosts
        },
        "events": event_entries(shown, count - len(shown) + 1),
        "orders": [msgspec.to_builtins(order) for order in status.orders],
    }


def event_entries(events: Sequence[EventRecord], first: int) -> list[Event]:
    """Return events as plain JSON, numbered `n` from `first` on, with the phases of changes in order."""
    return [
        {
            "n": n,
            "time": round(event.time, 3),
            "kind": event.kind,
            "text": event.text,
            "host": event.host,
            "worker": event.worker,
            "generation": event.generation,
            "took": {phase: round(took, 2) for phase, took in in_order(event.took).items()},
            "size": event.size,
        }
        for n, event in enumerate(events, first)
    ]


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> Json:
    """Return the merge patch from `old` to `new`. None in `new` means the same as a missing name."""
    out: Json = {name: None for name, value in old.items() if value is not None and new.get(name) is None}
    for name, value in new.items():
        before = old.get(name)
        if value is before:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(before, value)
            if inner:
                out[name] = inner
        elif value is not None and value != before:
            out[name] = value
    return out


def _host(host: HostStatus, workers: dict[str, WorkerRow], copies: dict[str, WorkerCopies], now: float) -> Host:
    until = {str(slot): round(now + left, 1) for slot, left in host.slots_in_backoff.items()}
    shown: Host = {
        "address": host.address,
        "slots": host.slots,
        "phase": host.phase,
        "reason": host.reason,
        "backoff_until": round(now + host.backoff_until, 1) if host.backoff_until else 0,
        "cpu": None if host.cpu is None else round(host.cpu),
        "memory": _megabytes(host.memory),
        "memory_total": _megabytes(host.memory_total),
        "gpus": _gpus(host.gpus),
        "slots_backoff_until": until,
        "workers": workers,
    }
    if copies:
        shown["copies"] = copies
    if host.ends_in is not None:
        shown["ends_at"] = round(now + host.ends_in, 1)
    return shown


@functools.lru_cache(maxsize=1024)  # most hosts have no news
def _gpus(gpus: tuple[GpuStatus, ...]) -> list[Gpu]:
    return [_gpu(gpu) for gpu in gpus]


def _gpu(gpu: GpuStatus) -> Gpu:
    """Round memory to what is shown, so that small variations are not sent."""
    used, total = (None if size is None else round(size / 1000, 1) for size in (gpu.memory, gpu.memory_total))
    return Gpu(gpu.busy, used, total, gpu.temperature)


def _worker(worker: WorkerStatus, gpus: Mapping[str, int]) -> WorkerRow:
    return WorkerRow(
        worker.rank,
        worker.state,
        worker.behind,
        worker.restarts,
        worker.pid,
        None if worker.cpu is None else round(worker.cpu),
        _megabytes(worker.memory),
        worker.reason,
        gpus.get(worker.gpu),
    )


def _copies(copies: CopiesStatus) -> Copies:
    return {
        "commit": copies.commit,
        "made_at": round(copies.made_at, 1),
        "seconds": float(f"{copies.seconds:.2g}"),
        "memory": _whole_megabytes(copies.memory),
        "workers": copies.workers,
    }


def _checkpoints(newest: CheckpointStatus) -> Checkpoints:
    size = float(f"{newest.size / MB:.3g}")
    return {"commit": newest.commit, "made_at": round(newest.made_at), "size": size, "every": newest.every}


def _summary(summary: JobSummary, now: float) -> Summary:
    share = summary.trained_share(now)
    return {
        "failures": summary.failures,
        "lost": summary.lost,
        "trained": None if share is None else math.floor(share * 1000) / 10,
    }


def _driver(driver: DriverFacts) -> Driver:
    return {
        "pid": driver.pid,
        "since": round(driver.since),
        "restarts": driver.number - 1,
        "lease": driver.lease,
        "versions": driver.versions,
    }


def _worker_copies(copies: WorkerCopiesStatus) -> WorkerCopies:
    copied_to, keeps = [[slot_name(worker) for worker in each] for each in (copies.copied_to, copies.keeps)]
    return WorkerCopies(_whole_megabytes(copies.memory), copied_to, keeps, copies.shared)


def _whole_megabytes(count: int) -> int:
    """Round up, so that a small model does not seem to have no copies."""
    return math.ceil(count / MB)


def _megabytes(count: int | None) -> int | None:
    """Round to ten megabytes, so that small variations are not sent."""
    return None if count is None else 10 * round(count / MB / 10)


def _rounded(value: float | str) -> float | str:
    """Round to what is shown. JSON has no NaN, so a loss that is NaN is sent as text. Text and whole numbers stay as they are."""
    if isinstance(value, str) or is_whole(value):
        return value
    return five_digits(value) if math.isfinite(value) else str(value)


def five_digits(value: float) -> float:
    rounded = float(f"{value:.5g}")
    return rounded if math.isfinite(rounded) else value  # the largest numbers would be infinite, which JSON has not
