"""Parts of a cluster die during training: `python -m tests.benchmarks.survive [--json FILE] [--quick]`.

Case `kernel`: the kernel is killed, the workers make some steps without a driver, and another process attaches. Times
are in seconds. `attach` lasts until the new process has the cluster, with and without its imports; `next step` until a
rank makes a step, and `whole` until all workers train. `stood still` is the longest time without a step around the
kill and the attach, `undisturbed` the same for as long a time before. `steps lost` counts steps.

Case `driver and …`: a second part is killed with kernel and driver. Case `… alone`: a part is killed while its kernel
lives; `whole` lasts until all workers train again, or until there is another controller. At the end of each case no
process is left.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

import nbelastic as nbe
from nbelastic.system.process_identity import is_alive
from tests.benchmarks.recovery import Cases, run
from tests.process.kernel_process import AttachedTraining, Kernel
from tests.support.processes import alive
from tests.support.waiting import until, until_none

WORLD = 4
SPELL = 2.0  # seconds without a driver
PATIENCE = 60.0  # seconds; a wait that takes longer counts as a hang
PARTS = ("worker", "agent", "template", "controller")


def longest(steps: list[dict], begin: float, end: float) -> float:
    """Return the longest time between two steps of rank 0, in seconds."""
    times = [line["t"] for line in steps if line["rank"] == 0 and begin <= line["t"] <= end]
    return max(b - a for a, b in itertools.pairwise(times))


def kill(victim: int) -> None:
    os.kill(victim, signal.SIGKILL)
    until(lambda: not alive(victim))


def lost(steps: list[dict]) -> float:
    """Count the steps below the newest that no rank made, and those that one process made twice."""
    numbers = {line["step"] for line in steps}
    twice = len(steps) - len({(line["pid"], line["step"]) for line in steps})
    return float(max(numbers) - len(numbers) + twice)


@contextmanager
def kept(hosts: str) -> Iterator[Kernel]:
    """Run a kernel with a kept cluster on which all workers train; at the end attach to it and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(f"survive-{os.getpid()}", Path(folder) / "steps", hosts).ready()
        yield kernel
        kernel.kill()
        cluster = nbe.Cluster.attach(kernel.name)
        AttachedTraining(cluster, cluster.job, kernel.folder).finish()
        cluster.stop()
        until_none(kernel.leftovers, 15)


def survive(rounds: int, part: str = "") -> dict[str, list[float]]:
    """Kill the kernel, or also its driver and another part, again and again; another kernel attaches each time."""
    names = ("attach", "attach, imports", "next step", "whole", "steps lost")
    found: dict[str, list[float]] = {name: [] for name in names}
    if not part:
        found |= {"stood still": [], "undisturbed": []}
    with kept(f"localhost:{WORLD}" if not part else f"localhost:{WORLD - 1},127.0.0.2:1") as kernel:
        for _ in range(rounds):
            kernel.wait_for_steps(WORLD)
            time.sleep(2 * SPELL)
            begun = time.time()
            if part:
                kernel.kill_with_driver()
                kill(kernel.pid_of(part))
            else:
                kernel.kill()
            time.sleep(SPELL)
            comes = time.time()
            imported, attached, whole = kernel.take_over(WORLD)
            found["attach"].append(attached - imported)
            found["attach, imports"].append(attached)
            found["next step"].append(min(line["t"] for line in kernel.steps() if line["t"] > comes) - comes)
            found["whole"].append(whole)
            found["steps lost"].append(lost(kernel.steps()))
            if not part:
                now = time.time()
                found["stood still"].append(longest(kernel.steps(), begun, now))
                found["undisturbed"].append(longest(kernel.steps(), begun - (now - begun), begun))
    return found


def unattended(rounds: int) -> dict[str, list[float]]:
    """Kill the kernel, and then a worker again and again, while no client is attached."""
    found: dict[str, list[float]] = {"next step": [], "whole": [], "steps lost": []}
    with kept(f"localhost:{WORLD}") as kernel:
        all_train(kernel, time.time())
        kernel.kill()
        for _ in range(rounds):
            time.sleep(SPELL)
            ranks = {line["pid"]: line for line in kernel.steps()}
            begun = time.time()
            kill(max((pid for pid in ranks if alive(pid)), key=lambda pid: ranks[pid]["rank"]))
            all_train(kernel, begun)
            found["whole"].append(time.time() - begun)
            smaller = [line["t"] for line in kernel.steps() if line["t"] > begun and line["world"] < WORLD]
            found["next step"].append(min(smaller, default=begun) - begun)
            found["steps lost"].append(lost(kernel.steps()))
    return found


def alone(rounds: int, part: str) -> dict[str, list[float]]:
    """Kill a part again and again, while its kernel lives."""
    found: dict[str, list[float]] = {"whole": [], "steps lost": []}
    with kept(f"localhost:{WORLD - 1},127.0.0.2:1") as kernel:
        for _ in range(rounds):
            all_train(kernel, time.time())
            begun = time.time()
            victim = kernel.pid_of(part)
            doomed = psutil.Process(victim).children(recursive=True)
            kill(victim)
            psutil.wait_procs(doomed)
            if part == "controller":
                until(lambda: is_alive(kernel.snapshot.controller), PATIENCE, "another controller")
            else:
                all_train(kernel, begun)
            found["whole"].append(time.time() - begun)
            found["steps lost"].append(lost(kernel.steps()))
    return found


def all_train(kernel: Kernel, since: float) -> None:
    """Wait until all workers have made a step together after `since`."""

    def is_whole() -> bool:
        made = {line["pid"] for line in kernel.steps() if line["world"] == WORLD and line["t"] > since}
        return len([pid for pid in made if alive(pid)]) == WORLD

    until(is_whole, PATIENCE, f"{WORLD} workers to train")


def cases(part: int) -> Cases:
    rounds = max(3, 20 // part)
    with_another = {f"driver and {name}": partial(survive, rounds, name) for name in PARTS}
    by_itself = {f"{name} alone": partial(alone, rounds, name) for name in PARTS}
    return {"kernel": partial(survive, rounds), "nobody": partial(unattended, rounds), **with_another, **by_itself}


if __name__ == "__main__":
    run(__doc__, 5, cases)
