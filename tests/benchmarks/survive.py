"""Kernels die under a training: `python -m tests.benchmarks.survive [--json FILE] [--quick]`.

`kernel`: SIGKILL, some steps without a driver, and another process attaches: seconds until it has the cluster, and until all
workers train; how long the training stood still at the longest, with the kill and the attaching in it, against as long a
time before; steps lost. The other cases kill a second part of the cluster with the kernel, and count what was left running.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import nbelastic as nbe
from tests.benchmarks.recovery import Cases, run
from tests.process.observing import alive, until
from tests.process.surviving import Found, Kernel

WORLD = 4
SPELL = 2.0  # seconds without a driver
PARTS = ("worker", "agent", "template", "controller")


def longest(steps: list[dict], begin: float, end: float) -> float:
    """Seconds from one step of rank 0 to the next."""
    times = [line["t"] for line in steps if line["rank"] == 0 and begin <= line["t"] <= end]
    return max(b - a for a, b in itertools.pairwise(times))


def survive(rounds: int, part: str = "") -> dict[str, list[float]]:
    """Kill the kernel, and another part a moment later, again and again; another kernel makes it whole each time."""
    found: dict[str, list[float]] = {"attach": [], "whole": []}
    if not part:
        found |= {"stood still": [], "undisturbed": []}
    with tempfile.TemporaryDirectory() as folder:
        hosts = f"localhost:{WORLD}" if not part else f"localhost:{WORLD - 1},127.0.0.2:1"
        kernel = Kernel(f"survive-{os.getpid()}", Path(folder) / "steps", hosts).ready()
        for _ in range(rounds):
            kernel.makes_steps(WORLD)
            time.sleep(2 * SPELL)
            begun = time.time()
            kernel.kill()
            if part:
                victim = kernel.part(part)
                os.kill(victim, signal.SIGKILL)
                until(lambda victim=victim: not alive(victim))
            time.sleep(SPELL)
            attached, whole = kernel.again(WORLD)
            found["attach"].append(attached)
            found["whole"].append(whole)
            if not part:
                now = time.time()
                found["stood still"].append(longest(kernel.steps(), begun, now))
                found["undisturbed"].append(longest(kernel.steps(), begun - (now - begun), begun))
        kernel.kill()
        cluster = nbe.Cluster.attach(kernel.name)
        training = Found(cluster, cluster.job, kernel.folder)
        training.finish()  # no step is lost, and none made twice
        cluster.stop()
        until(lambda: not kernel.left(), 15, "nothing to be left")
        found["steps lost"] = [0.0]
    return found


def cases(part: int) -> Cases:
    rounds = max(3, 20 // part)
    with_another = {f"kernel and {name}": partial(survive, rounds, name) for name in PARTS}
    return {"kernel": partial(survive, rounds), **with_another}


if __name__ == "__main__":
    run(__doc__, 5, cases)
