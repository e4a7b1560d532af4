"""Random faults while four workers train: `python -m tests.benchmarks.chaos [--faults N] [--seed N] [--drivers] [--stream] …`.

The faults: SIGKILL of one or two members or of a newcomer; SIGSTOP, sometimes with SIGCONT; hosts added, drained or
removed at once; another maximum. With `--drivers` every second fault is a SIGKILL of the cluster's driver.

At the end every sample of every epoch was used exactly once, and all ranks held the same bits after each commit. The losses are those of
a run without faults and of one process, and no resources were lost. The benchmark prints the goodput: steps per second
with faults relative to steps per second without, from the first step to the last.

With `--stream` the samples come from an `ElasticStream` of uneven shards. Its batches depend on the world, so there are no
losses to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

import nbelastic as nbe
from nbelastic.protocol.run_folder import RunFolder
from tests.benchmarks import chaos_program as program
from tests.benchmarks import chaos_stream
from tests.support.nccl_double import CLUSTERS
from tests.support.processes import alive, processes_of
from tests.support.waiting import until

WORKERS, MOST = 4, 6
EXTRA_HOST = "127.0.0.2"
WARM = 10  # generations after which a worker has all that it makes only once: it keeps the groups that it left last
STANDSTILL = 3.0  # seconds without a step after which the cluster's reason is noted
# What may grow in a hundred faults: rank 0 serves its peers' stores, and the allocator keeps memory that it had once. A
# leak of one resource per generation would be more.
ALLOWED = {"sockets": 8, "files": 16, "threads": 6, "MB": 30}

Resources = dict[str, float]
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")  # none of the faults is one of these


class Watch:
    """How long the training made no step, and which processes there were."""

    def __init__(self, cluster: nbe.Cluster) -> None:
        self._cluster = cluster
        self._step, self._at = 0, time.monotonic()
        self.longest = 0.0
        self.standstills: list[str] = []
        self.pids: set[int] = set()

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.poll()
            time.sleep(min(left, 0.05))

    def poll(self) -> None:
        now, status = time.monotonic(), self._cluster.status()
        self.pids |= {w.pid for w in status.workers if w.pid}
        still = now - self._at
        self.longest = max(self.longest, still)
        if status.step > self._step:
            if still > STANDSTILL:
                self.standstills.append(f"{still:.1f} s")
            self._step, self._at = status.step, now
        elif still > STANDSTILL and (not self.standstills or self.standstills[-1] != status.reason):
            self.standstills.append(status.reason)


class Storm:
    """Faults, one after the other; one member that holds the state always survives."""

    def __init__(self, cluster: nbe.Cluster, dice: random.Random, watch: Watch, *, drivers: bool) -> None:
        self._cluster, self._dice, self._watch = cluster, dice, watch
        self._faulted: dict[int, float] = {}
        self.spared = 0  # a pid
        self._kinds: dict[Callable[[], object], int] = {
            self.kill_one: 4,
            self.kill_two: 2,
            self.kill_newcomer: 1,
            self.stop: 2,
            self.stop_and_continue: 2,
            self.add: 3,
            self.drain: 2,
            self.take_away: 1,
            self.move_maximum: 2,
        }
        if drivers:
            self._kinds[self.kill_driver] = sum(self._kinds.values())

    def inject_fault(self) -> str:
        kind = self._dice.choices(list(self._kinds), list(self._kinds.values()))[0]
        with suppress(nbe.DriverLostError):
            kind()
        return kind.__name__

    def _members(self, count: int) -> list[psutil.Process]:
        """Return random members that have trained, but never all of them."""
        now = time.monotonic()
        # Older victims have ended, or run again.
        self._faulted = {pid: at for pid, at in self._faulted.items() if now - at < 3}
        trained = [w.pid for w in self._cluster.workers if w.rank is not None and w.step and w.pid not in self._faulted]
        choice = [pid for pid in trained if pid != self.spared]
        count = min(count, len(trained) - 1, len(choice))
        return self._processes(self._dice.sample(choice, max(0, count)))

    def _processes(self, pids: list[int]) -> list[psutil.Process]:
        found = []
        for pid in pids:
            self._faulted[pid] = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def _send(self, sig: signal.Signals, victims: list[psutil.Process]) -> None:
        for victim in victims:
            with suppress(psutil.NoSuchProcess):  # psutil checks that the pid is not another process's by now
                victim.send_signal(sig)

    def kill_one(self) -> None:
        self._send(signal.SIGKILL, self._members(1))

    def kill_two(self) -> None:
        self._send(signal.SIGKILL, self._members(2))

    def kill_newcomer(self) -> None:
        waiting = [w.pid for w in self._cluster.workers if w.rank is None and w.pid]
        self._send(signal.SIGKILL, self._processes(waiting[:1]))

    def stop(self) -> None:
        self._send(signal.SIGSTOP, self._members(1))

    def stop_and_continue(self) -> None:
        """Continue the worker before the driver misses it, or when it is stale."""
        victims = self._members(1)
        self._send(signal.SIGSTOP, victims)
        self._watch.sleep(self._dice.uniform(0.02, 0.6))
        self._send(signal.SIGCONT, victims)

    def kill_driver(self) -> None:
        """Kill the driver, also while it takes over from one that was killed just before."""
        driver = RunFolder(self._cluster.name).driver
        with suppress(ProcessLookupError):
            if driver:
                os.kill(driver, signal.SIGKILL)

    def add(self) -> None:
        self._cluster.add_host(f"{EXTRA_HOST}:{self._dice.choice([1, 2])}")

    def drain(self) -> None:
        self.remove_extra_host(now=False)

    def take_away(self) -> None:
        self.remove_extra_host(now=True)

    def remove_extra_host(self, *, now: bool) -> None:
        if any(host.name == EXTRA_HOST for host in self._cluster.hosts):
            with suppress(nbe.UsageError):  # the host has just been removed
                self._cluster.remove_host(EXTRA_HOST, now=now)

    def move_maximum(self) -> None:
        self._cluster.scale(max=self._dice.randint(2, MOST))


def resources_of(process: psutil.Process) -> Resources:
    return {
        "sockets": len(process.net_connections("inet")),
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "MB": process.memory_info().rss / 1e6,
    }


def resources_by_name(**processes: psutil.Process) -> dict[str, Resources]:
    """Return the resources of each process that still runs: the spared worker may have been replaced after a hang."""
    found = {}
    for name, process in processes.items():
        with suppress(psutil.NoSuchProcess):
            found[name] = resources_of(process)
    return found


def settle(cluster: nbe.Cluster, job: nbe.Job, storm: Storm, watch: Watch) -> None:
    """Wait until the cluster has the four workers of the beginning again."""
    watch.pids |= processes_of(cluster)
    cluster.scale(max=WORKERS)
    end = time.monotonic() + 30
    while True:
        storm.remove_extra_host(now=False)  # the last fault may have added it
        status = cluster.status()
        home = [w for w in status.workers if w.rank is not None]
        if len(status.hosts) == 1 and status.world_size == len(home) == WORKERS and all(w.step for w in home):
            break
        if job.done():
            raise RuntimeError(f"the job ended: {job.exception()}")
        if time.monotonic() > end:
            raise TimeoutError(status.reason)
        watch.sleep(0.05)
    watch.sleep(1)  # workers keep the groups that they left last for a while


def eldest(cluster: nbe.Cluster) -> psutil.Process:
    """Return a member that is not rank 0, because rank 0 is to be killed too."""
    members = sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank or 0)
    return psutil.Process(members[1].pid)


def storm_through(
    cluster: nbe.Cluster, faults: int, seed: int, pause: float, job: nbe.Job, *, drivers: bool
) -> dict[str, Any]:
    """Inject all faults; spare one worker in the first half, to compare its resources before and after."""
    dice, watch = random.Random(seed), Watch(cluster)
    storm = Storm(cluster, dice, watch, drivers=drivers)
    done: Counter[str] = Counter()

    def inject(count: int) -> None:
        for _ in range(count):
            if job.done():
                return
            watch.sleep(pause * (0.5 + dice.random()))
            done[storm.inject_fault()] += 1

    settle(cluster, job, storm, watch)
    kernel, elder = psutil.Process(), eldest(cluster)
    storm.spared = elder.pid
    while cluster.status().generation < WARM and sum(done.values()) < faults // 2 and not job.done():
        inject(1)
    settle(cluster, job, storm, watch)
    before = resources_by_name(kernel=kernel, elder=elder)
    inject(faults // 2 - sum(done.values()))
    settle(cluster, job, storm, watch)
    after = resources_by_name(elder=elder)
    storm.spared = 0
    inject(faults - faults // 2)
    settle(cluster, job, storm, watch)
    after |= resources_by_name(kernel=kernel)
    watch.pids |= processes_of(cluster)
    return {
        "faults": sum(done.values()),
        "kinds": dict(done),
        "longest standstill": watch.longest,
        "stood still": watch.standstills,
        "before": before,
        "after": after,
        "pids": watch.pids,
    }


def run(
    faults: int,
    seed: int,
    pause: float,
    epochs: int | None = None,
    *,
    drivers: bool = False,
    train: Callable[..., dict[str, Any]] = program.train,
    **more: Any,
) -> dict[str, Any]:
    """Run `train` through faults, or for `epochs` without; return what was observed, and each rank's results.

    With `drivers` drivers are killed too. `more`: options of the cluster.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch("nbelastic.client.replacement.MAX_LOSSES", 1_000_000):
        options = {"min": 1, "max": WORKERS, "cooldown": (0, 0), "silence": 3.0 if drivers else 10.0, **more}
        with nbe.Cluster(f"localhost:{WORKERS}", **options) as cluster:
            cluster.wait(WORKERS, timeout=60)
            job = cluster.run(train, folder, epochs)
            cluster.wait(WORKERS, timeout=30)
            if faults:
                found = storm_through(cluster, faults, seed, pause, job, drivers=drivers)
            pids = processes_of(cluster) | found.pop("pids", set())
            if epochs is None:
                (Path(folder) / "finish").touch()
            results = job.result(timeout=3600)
            texts = [event.text for event in cluster.events]
        found["left running"] = not _all_gone(pids)
        found["different commits"] = different_commits(Path(folder))
    first = results[0]
    return {
        **found,
        "epochs": first["epochs"],
        "steps": first["steps"],
        "steps a second": (first["steps"] - 1) / first["seconds"],
        "steps lost": max(result["lost"] for result in results),
        "used once": all(result["used"] == {first["epochs"]} for result in results),
        "same bits": all(result["parameters"] == first["parameters"] for result in results),
        "worlds": sum(text.startswith("world of") for text in texts),
        "unexplained breaks": [text for text in texts if "though every worker lives" in text],
        "crashes": [text for text in texts if any(name in text for name in CRASHES)],
        "begun again": texts.count("job-1 was submitted") - 1,
        "lost wake-ups": sum("exit code 75" in text for text in texts),
        "curve": [number for (number,) in struct.iter_unpack("d", bytes.fromhex(first.get("curve", "")))],
    }


def _all_gone(pids: set[int]) -> bool:
    with suppress(AssertionError):
        until(lambda: not any(alive(pid) for pid in pids if pid != os.getpid()), 5)
        return True
    return False


def different_commits(folder: Path) -> list[str]:
    """The commits of a generation after which two ranks had different bits."""
    seen: dict[str, str] = {}
    lines = (line.split() for file in folder.glob("*.commits") for line in file.read_text().splitlines())
    return sorted({name for name, bits in lines if seen.setdefault(name, bits) != bits})


def farthest(curve: list[float], other: list[float]) -> float:
    """Return the greatest relative difference between two curves; infinite if their lengths differ."""
    if len(curve) != len(other):
        return float("inf")
    return max(abs(a - b) / b for a, b in zip(curve, other, strict=True))


def problems(found: dict[str, Any], *curves: list[float]) -> list[str]:
    """Describe each expectation that did not hold."""
    bad = [
        f"{name}: {found[name]}"
        for name in ("steps lost", "begun again", "left running", "different commits", "unexplained breaks", "crashes")
        if found[name]
    ]
    bad += [f"not {name}" for name in ("used once", "same bits") if not found[name]]
    for other in curves:
        distance = farthest(found["curve"], other)
        if not distance <= program.TOLERANCE:
            bad.append(f"a loss is off by {distance:.2g}, more than {program.TOLERANCE:g}")
    for who, after in found.get("after", {}).items():
        before = found["before"][who]
        bad += [
            f"{who}: {name} {before[name]:.0f} -> {after[name]:.0f}"
            for name, most in ALLOWED.items()
            if after[name] - before[name] > most
        ]
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only-faults", action="store_true", help="compare with one process only, without the goodput")
    parser.add_argument("--nccl", action="store_true", help="on the tests' double of NCCL")
    parser.add_argument("--drivers", action="store_true", help="kill the driver as well")
    parser.add_argument("--stream", action="store_true", help="train on an ElasticStream")
    options = parser.parse_args()
    more = CLUSTERS["nccl" if options.nccl else "gloo"]
    more = more | {"train": chaos_stream.train if options.stream else program.train}
    disturbed = run(options.faults, options.seed, options.pause, drivers=options.drivers, **more)
    quiet = None if options.only_faults else run(0, options.seed, options.pause, disturbed["epochs"], **more)
    curves = [] if quiet is None or options.stream else [quiet["curve"]]
    for name, values in (("disturbed", disturbed), ("undisturbed", quiet or {})):
        print(name, *(f"    {k}: {v}" for k, v in values.items() if k != "curve"), sep="\n")
    if not options.stream:
        alone = program.alone(disturbed["epochs"])
        curves.append(alone)
        print(f"loss {alone[0]:.4f} -> {sum(alone[-program.STEPS :]) / program.STEPS:.4f}", end="")
        print(f", off by {max(farthest(disturbed['curve'], curve) for curve in curves):.1e} at most")
    if quiet is not None:
        print(f"goodput {disturbed['steps a second'] / quiet['steps a second']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"disturbed": disturbed, "undisturbed": quiet}, indent=1) + "\n")
    bad = problems(disturbed, *curves)
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
