"""Hosts by ssh, how fast they start, join and are lost: `python -m tests.benchmarks.hosts [--json FILE] [--quick]`.

The hosts are network namespaces of this machine with an OpenSSH server each (`tests.hosts.network`; needs root). They
share the machine's cores, so a start of eight hosts costs eight times the CPU of one, unlike on eight machines.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import nbelastic as nbe
from tests.benchmarks import programs
from tests.benchmarks.recovery import Cases, run, steps_in, wait_until
from tests.hosts.network import Network

ROOT = Path(__file__).parents[2]  # workers import the programs from here
LONG = 120.0


@contextmanager
def machines(count: int) -> Iterator[Network]:
    with Network(count) as network:
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{network.path}:{before}"
        try:
            yield network
        finally:
            os.environ["PATH"] = before


def start(rounds: int) -> dict[str, list[float]]:
    """Return the seconds from start() until all workers are ready on one and on eight hosts, and the CPU seconds."""
    found: dict[str, list[float]] = {"one": [], "eight": [], "ratio": [], "one, cpu s": [], "eight, cpu s": []}
    with machines(8):
        for _ in range(rounds):
            for name, count in (("one", 1), ("eight", 8)):
                hosts = ",".join(f"h{number}:1" for number in range(1, count + 1))
                began, used = time.monotonic(), sum(psutil.cpu_times()[:3])
                with nbe.Cluster(hosts, min=count, cwd=ROOT):
                    found[name].append(time.monotonic() - began)
                    found[f"{name}, cpu s"].append(sum(psutil.cpu_times()[:3]) - used)
            found["ratio"].append(found["eight"][-1] / found["one"][-1])
    return found


def discovered(rounds: int) -> dict[str, list[float]]:
    """Add a host to the discovery's answer while two others train; return the seconds until each stage."""
    found: dict[str, list[float]] = {"discover": [], "start": [], "join": [], "all": []}
    with machines(3), tempfile.TemporaryDirectory() as folder:
        listed, script = Path(folder) / "hosts.txt", Path(folder) / "hosts.sh"
        listed.write_text("h1:1\nh2:1\n")
        script.write_text(f"#!/bin/sh\ncat {listed}\n")
        script.chmod(0o755)
        with nbe.Cluster(discovery=str(script), min=1, cooldown=(0, 0), cwd=ROOT) as cluster:
            job = cluster.run(programs.record_steps, folder, 10**9)
            for _ in range(rounds):
                cluster.wait(2, timeout=LONG)
                seen, edited = len(cluster.events), time.time()
                listed.write_text("h1:1\nh2:1\nh3:1\n")
                cluster.wait(3, timeout=LONG)
                news = {event.kind: event.time for event in reversed(cluster.events[seen:])}
                found["discover"].append(news["host-added"] - edited)
                found["start"].append(news["change-planned"] - news["host-added"])
                found["join"].append(news["world-formed"] - news["change-planned"])
                found["all"].append(news["world-formed"] - edited)
                listed.write_text("h1:1\nh2:1\n")
                wait_until(lambda: len(cluster.hosts) == 2, LONG)
            job.stop()
            job.wait(timeout=20)
    return found


def missed(rounds: int, fault: str, silence: float) -> dict[str, list[float]]:
    """Kill or disconnect one of three hosts of two workers; return the seconds until the others make a step."""
    struck: list[float] = []
    found: dict[str, list[float]] = {"next": [], "lost": []}
    options = {"min": 1, "silence": silence, "cooldown": (0, 0), "cwd": ROOT}
    with machines(3) as network, tempfile.TemporaryDirectory() as folder:
        with nbe.Cluster("h1:2,h2:2,h3:2", **options) as cluster:
            job = cluster.run(programs.record_steps, folder, 10**9)
            for number in range(rounds):
                cluster.wait(6, timeout=LONG)
                time.sleep(1)
                victim = f"h{number % 3 + 1}"  # rank 0's host is one of them
                struck.append(time.time())
                getattr(network, fault)(victim)
                wait_until(lambda name=victim: all(w.host != name for w in cluster.workers), LONG)
                wait_until(lambda: cluster.status().phase == "running", LONG)
                time.sleep(0.5)
                network.reboot(victim)
            job.stop()
            job.wait(timeout=20)
        steps = steps_in(folder)
    for at in struck:
        before = max(step["step"] for step in steps if step["t"] <= at)
        after = next(step for step in steps if step["t"] > at and step["world"] < 6)
        found["next"].append(after["t"] - at)
        found["lost"].append(max(0.0, before - (after["step"] - 1)))
    return found


def walled(rounds: int, kills: int = 5) -> dict[str, list[float]]:
    """Seconds of a start, and from a worker's kill to the next step: without a firewall, and behind one in turn.

    Behind it hosts can open no connection to the driver's machine.
    """
    found: dict[str, list[float]] = {f"{kind}, {how}": [] for kind in ("start", "next") for how in ("open", "walled")}
    with machines(3) as network:
        for _ in range(rounds):
            for how in ("open", "walled"):
                if how == "walled":
                    network.wall("h1", "h2", "h3")
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    with nbe.Cluster("h1:1,h2:1,h3:1", min=1, cooldown=(0, 0), cwd=ROOT) as cluster:
                        cluster.wait(3, timeout=LONG)
                        found[f"start, {how}"].append(time.monotonic() - began)
                        job = cluster.run(programs.record_steps, folder, 10**9)
                        killed = [kill_one(cluster) for _ in range(kills)]
                        job.stop()
                        job.wait(timeout=20)
                    steps = steps_in(folder)
                found[f"next, {how}"] += [
                    next(step["t"] for step in steps if step["t"] > at and step["world"] < 3) - at for at in killed
                ]
                network.heal()
    return found


def kill_one(cluster: nbe.Cluster) -> float:
    """Kill the last of three workers that train, wait until the others do, and return the time of the kill."""
    cluster.wait(3, timeout=LONG)
    wait_until(lambda: cluster.status().world_size == 3 and cluster.status().phase == "running", LONG)
    time.sleep(1)
    worker = next(w for w in cluster.workers if w.rank == 2)
    at = time.time()
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: all(w.id != worker.id for w in cluster.workers), LONG)
    time.sleep(1)  # the others make steps
    return at


def edited(rounds: int) -> dict[str, list[float]]:
    """Edit a module that eight hosts do not have, and run a cell; return the seconds until all results of the new code are here."""
    found: dict[str, list[float]] = {"run": []}
    before, home = list(sys.path), Path.cwd()
    with machines(0) as network:
        folder = network.folder / "notebook"
        folder.mkdir()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        names = [f"a{number}" for number in range(8)]
        network.add(*names, hides=(str(folder),))
        try:
            write_number(folder, 0)
            with nbe.Cluster(",".join(f"{name}:1" for name in names), min=8, cwd=ROOT) as cluster:
                for number in range(rounds + 1):  # the first one imports
                    write_number(folder, number)
                    began = time.monotonic()
                    assert cluster.run_cell("import edited_module; edited_module.N").result(LONG) == [number] * 8
                    found["run"].append(time.monotonic() - began)
        finally:
            os.chdir(home)
            sys.path[:] = before
    del found["run"][0]
    return found


def write_number(folder: Path, number: int) -> None:
    (folder / "edited_module.py").write_text(f"N = {number}\n")


def cases(part: int) -> Cases:
    def rounds(count: int) -> int:
        return max(2, count // part)

    return {
        "start": lambda: start(rounds(5)),
        "discovered": lambda: discovered(rounds(10)),
        "walled": lambda: walled(rounds(5)),
        "edited": lambda: edited(rounds(20)),
        "killed": lambda: missed(rounds(15), "kill", 10.0),
        "cut off": lambda: missed(rounds(12), "cut", 2.0),
    }


if __name__ == "__main__":
    run(__doc__, 3, cases)
