"""What the dashboard costs: `python -m tests.benchmarks.dashboard [--json FILE] [--quick]`.

The benchmark measures the CPU of driver and kernel with four workers, idle and training, with and without a dashboard.
For a cluster of 64 hosts with 8 slots it measures what the kernel computes and sends, with a history of 100,000 reports.
"""

from __future__ import annotations

import time

import psutil
from msgspec import json
from msgspec.structs import replace

import nbelastic as nbe
from nbelastic.notebook.dashboard import Dashboard
from nbelastic.notebook.dashboard_state import DashboardState
from nbelastic.protocol.report_history import ReportHistory
from nbelastic.protocol.status import EventRecord, GpuStatus, HostStatus, Status, WorkerStatus
from tests.benchmarks import recovery
from tests.benchmarks.recovery import Cases, training
from tests.support.processes import driver_pid

HOSTS, SLOTS = 64, 8


class Processors:
    """The CPU of the driver's process and of this kernel's process, in percent of a core."""

    def __init__(self, cluster: nbe.Cluster) -> None:
        self._processes = {"driver": psutil.Process(driver_pid(cluster)), "kernel": psutil.Process()}
        self.found: dict[str, list[float]] = {}

    def measure(self, what: str, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            began = {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}
            time.sleep(seconds)
            for name, process in self._processes.items():
                used = sum(process.cpu_times()[:2]) - began[name]
                self.found.setdefault(f"{name}, {what}", []).append(used / seconds * 100)


def driver(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the CPU of driver and kernel with four workers, idle and with steps of 5 ms."""
    found: dict[str, list[float]] = {}
    with nbe.Cluster("localhost:4", min=4) as cluster:
        found |= _shown_or_not(cluster, "rest", rounds, seconds)
    with training("localhost:4", min=4) as (cluster, _):
        cluster.wait(4)
        found |= _shown_or_not(cluster, "training", rounds, seconds)
    return found


def _shown_or_not(cluster: nbe.Cluster, what: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    processors = Processors(cluster)
    processors.measure(what, rounds, seconds)
    shown = Dashboard(cluster)
    processors.measure(f"{what}, shown", rounds, seconds)
    shown.close()
    return processors.found


def wide(step: int) -> Status:
    """Return the status of 512 workers that train; each step changes every worker's CPU and memory."""
    hosts = tuple(
        HostStatus(
            f"gpu-node-{h:03}",
            f"10.20.30.{h}",
            SLOTS,
            "up",
            "",
            0.0,
            50.0 + (h + step) % 9,
            2 * 10**11,
            5 * 10**11,
            tuple(GpuStatus(f"GPU-{s}", 97, 71_000, 81_559, 71) for s in range(SLOTS)),
        )
        for h in range(HOSTS)
    )
    workers = tuple(
        WorkerStatus(
            f"{host.name}/{s}#1",
            host.name,
            s,
            h * SLOTS + s,
            s,
            10_000 + s,
            "running",
            step,
            0,
            "",
            "",
            95.0 + (h + s + step) % 10,
            9 * 10**9,
            gpu=f"GPU-{s}",
        )
        for h, host in enumerate(hosts)
        for s in range(SLOTS)
    )
    curve = tuple(2.3 / (i + 1) for i in range(99))
    status = Status("wide", "running", "512 workers train", 3, 512, 8, None, hosts, workers, "job-1", "", step)
    return replace(status, report={"loss": 0.2}, curves={"loss": curve}, time=1.7e9 + step)


def large(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds and kilobytes of an update with 512 workers: complete, per step, per second."""
    events = [EventRecord(1.7e9, "world-formed", "world of 512 at generation 3", generation=3, took={"form": 1.0})] * 12
    found: dict[str, list[float]] = {name: [] for name in ("make, ms", "whole, kB", "step, kB", "samples, kB")}
    for _ in range(rounds):
        frames, first = DashboardState(), wide(0)
        frames.update(first, events, 12)
        found["whole, kB"].append(len(json.encode(frames.state)) / 1000)
        frames.update(replace(first, step=1, time=first.time + 0.25), events, 12)
        found["step, kB"].append(len(json.encode(frames.change)) / 1000)
        second = wide(2)
        began = time.perf_counter()
        frames.update(second, events, 12)
        found["make, ms"].append((time.perf_counter() - began) * 1000)
        found["samples, kB"].append(len(json.encode(frames.change or frames.state)) / 1000)
    return found


def reports(rounds: int) -> dict[str, list[float]]:
    """Return what 100,000 reports of three names cost: one of them in the driver, all of them once, and the new ones per second."""
    names = ("add one, µs", "whole, kB", "new rows, kB", "answer whole, ms")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        history = ReportHistory()
        began = time.perf_counter()
        for step in range(100_000):
            history.add((step, 1.7e9 + step / 4, 3, 512), {"loss": 2.3 / (1 + step), "accuracy": 0.5, "lr": 0.1})
        found["add one, µs"].append((time.perf_counter() - began) * 10)
        began = time.perf_counter()
        whole = history.since("", 0)
        text = json.encode(whole)
        found["answer whole, ms"].append((time.perf_counter() - began) * 1000)
        found["whole, kB"].append(len(text) / 1000)
        for step in range(100_000, 100_004):
            history.add((step, 1.7e9 + step / 4, 3, 512), {"loss": 2.3 / (1 + step), "accuracy": 0.5, "lr": 0.1})
        found["new rows, kB"].append(len(json.encode(history.since(whole.version, len(whole.rows)))) / 1000)
    return found


def cases(part: int) -> Cases:
    return {
        "driver": lambda: driver(max(2, 5 // part), 5.0),
        "large": lambda: large(max(5, 50 // part)),
        "reports": lambda: reports(max(2, 5 // part)),
    }


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
