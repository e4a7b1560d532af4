"""What the dashboard's view is sent: a key frame, and what has changed since then as a JSON Merge Patch (RFC 7386).

Pure functions of a `Status` and the last events. A view that is opened later gets both and needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from nbelastic.client.trace import in_order
from nbelastic.protocol.status import EventRecord, HostStatus, Status, WorkerStatus

EVENTS = 12  # how many of the last events travel along
SMALL = 8_000  # bytes of JSON up to which all is sent whole
MB = 1_000_000

Json = dict[str, Any]


class Frames:
    """Remembers the key frame. One thread's."""

    def __init__(self) -> None:
        self.state: Json = {"n": 0}
        self.change: Json = {}
        self._shown: Json = {}
        self._whole = False

    def begin_again(self) -> None:
        """Send a key frame with the next update: a view has missed the last one."""
        self._shown = {}
        self._whole = True

    def show(self, status: Status, events: Sequence[EventRecord], count: int) -> bool:
        """Take in what there is to be seen now; `events` are the newest of `count`. False if nothing has changed."""
        view = frame(status, events, count)
        if view == self._shown:
            return False
        self._shown = view
        time = round(status.time, 3)
        change = patch({name: value for name, value in self.state.items() if name not in ("n", "time")}, view)
        sizes = [len(msgspec.json.encode(each)) for each in (change, view)]
        whole, self._whole = self._whole, False
        if whole or self.state["n"] == 0 or sizes[1] <= SMALL or sizes[0] > sizes[1] // 2:
            self.state = {"n": self.state["n"] + 1, "time": time, **view}
            self.change = {}
        else:
            self.change = {"base": self.state["n"], "patch": {"time": time, **change}}
        return True


def frame(status: Status, events: Sequence[EventRecord], count: int) -> Json:
    """All that a view shows, but for the time of the look."""
    workers: dict[str, Json] = {host.name: {} for host in status.hosts}
    for worker in status.workers:
        workers.setdefault(worker.host, {})[worker.id[len(worker.host) + 1 :]] = _worker(worker)
    shown = events[-EVENTS:]
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
        "steps_per_second": _rounded(status.steps_per_second),
        "report": {name: _rounded(value) for name, value in status.report.items()},
        "curves": {name: [_rounded(value) for value in values] for name, values in status.curves.items()},
        "failed_at": status.failed_at,
        "hosts": {host.name: _host(host, status.time) | {"workers": workers[host.name]} for host in status.hosts},
        "events": entries(shown, count - len(shown) + 1),
        "orders": [msgspec.to_builtins(order) for order in status.orders],
    }


def entries(events: Sequence[EventRecord], first: int) -> list[Json]:
    """Events as plain JSON, with their numbers `n` from `first` on, and the phases of changes in their order."""
    return [
        {
            **msgspec.to_builtins(event),
            "time": round(event.time, 3),
            "took": {phase: round(took, 2) for phase, took in in_order(event.took).items()},
            "n": n,
        }
        for n, event in enumerate(events, first)
    ]


def patch(old: Json, new: Json) -> Json:
    """The merge patch that makes `new` of `old`. A None in `new` is as good as a missing name."""
    out: Json = {name: None for name, value in old.items() if value is not None and new.get(name) is None}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = patch(before, value)
            if inner:
                out[name] = inner
        elif value is not None and value != before:
            out[name] = value
    return out


def _host(host: HostStatus, now: float) -> Json:
    until = {str(slot): round(now + left, 1) for slot, left in host.slots_in_backoff.items()}
    return {
        "address": host.address,
        "slots": host.slots,
        "phase": host.phase,
        "reason": host.reason,
        "until": round(now + host.backoff_until, 1) if host.backoff_until else 0,
        "cpu": None if host.cpu is None else round(host.cpu),
        "memory": _megabytes(host.memory),
        "of": _megabytes(host.memory_total),
        "gpus": [list(gpu) for gpu in host.gpus],
        "slots_until": until,
    }


def _worker(worker: WorkerStatus) -> list[Any]:
    cpu = None if worker.cpu is None else round(worker.cpu)
    memory = _megabytes(worker.memory)
    return [
        worker.rank,
        worker.state,
        worker.behind,
        worker.restarts,
        worker.pid,
        cpu,
        memory,
        worker.reason,
    ]


def _megabytes(count: int | None) -> int | None:
    """In steps of ten: what merely breathes is not sent each time."""
    return None if count is None else 10 * round(count / MB / 10)


def _rounded(value: float | str | None) -> float | str | None:
    """To what is shown. JSON has no NaN, and a loss that became one is worth seeing. A word, as a phase, stays."""
    if value is None or isinstance(value, str):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
