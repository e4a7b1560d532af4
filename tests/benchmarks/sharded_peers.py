"""Sharded training under nbelastic and under torchrun: the same model and the same kills, in turn.

A round is a fresh start of each system, and then kills at any moment between two checkpoints. `next` is from SIGKILL of a
random rank to the first step of a world that formed after it, `full` to the first such step of four ranks, and `lost`
counts the steps that are done again. nbelastic copies every commit; torchrun's script saves a DCP checkpoint every 20 steps.

`python -m tests.benchmarks.sharded_peers FOLDER` trains with nbelastic until SIGTERM.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

import nbelastic as nbe
from tests.benchmarks import sharded_programs
from tests.benchmarks.peers.running import private_network, started
from tests.benchmarks.recovery import steps_in

N = 4
PATIENCE = 180.0  # seconds; a system without a next step by then has failed
LOOK = 0.05
SPELL = 20.0  # seconds; a kill comes at any moment of it
Steps = list[dict[str, Any]]
T = TypeVar("T")


def commands() -> dict[str, tuple[str, ...]]:
    """The command of each system, without its last argument, the folder."""
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(N), "--max-restarts", "100", "--monitor-interval", "0.1"),
        *("-m", "tests.benchmarks.sharded_torchrun"),
    )
    return {"nbelastic": (sys.executable, "-m", "tests.benchmarks.sharded_peers"), "torchrun": torchrun}


def wait_for(look: Callable[[], T | None]) -> T:
    end = time.monotonic() + PATIENCE
    while (found := look()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"no step within {PATIENCE:.0f} s")
        time.sleep(LOOK)
    return found


def read(folder: str) -> Steps:
    return [line for line in steps_in(folder) if line["what"] == "step"]


def members(folder: str) -> list[int] | None:
    """Return the processes of a world of full size that have made the newest step, and some before, together."""
    steps = read(folder)
    newest = max((step["step"] for step in steps), default=0)
    pids = {step["pid"] for step in steps if step["step"] == newest - 1 and step["world"] == N}
    alive = [pid for pid in sorted(pids) if psutil.pid_exists(pid)]
    return alive if len(alive) == N else None


def kill_one(folder: str) -> dict[str, float]:
    """Kill a rank; return the seconds to the next step and to full size, and the steps that are lost."""
    wait_for(lambda: members(folder))
    time.sleep(random.random() * SPELL)
    victim = random.choice(wait_for(lambda: members(folder)))
    at = time.time()
    os.kill(victim, signal.SIGKILL)
    before = {step["pid"] for step in read(folder) if step["t"] <= at}

    def after(world: tuple[int, ...]) -> dict[str, Any] | None:
        later = (step for step in read(folder) if step["t"] > at and step["pid"] != victim)
        return next((s for s in later if s["world"] in world and (s["world"] < N or s["pid"] not in before)), None)

    first = wait_for(lambda: after(tuple(range(1, N + 1))))
    full = wait_for(lambda: after((N,)))
    reached = max(step["step"] for step in read(folder) if step["t"] < first["t"])
    return {"next": first["t"] - at, "full": full["t"] - at, "lost": float(max(0, reached - (first["step"] - 1)))}


def compare(rounds: int, kills: int, every_interface: bool = False) -> dict[str, list[float]]:
    """Kill ranks of each system, in turn; nothing is measured where a private network cannot be had."""
    if not private_network() and not every_interface:
        print("peers: skipped: torchrun listens on every interface, and a private network (unshare, ip) cannot be had")
        return {}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, command in commands().items():
            with (
                tempfile.TemporaryDirectory() as folder,
                started([*command, folder], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
            ):
                for _ in range(kills):
                    for what, value in kill_one(folder).items():
                        found.setdefault(f"{name}, {what}", []).append(value)
            found.setdefault("load average", []).append(os.getloadavg()[0])
    for what in ("next", "full"):
        theirs, ours = (statistics.median(found[f"{name}, {what}"]) for name in ("torchrun", "nbelastic"))
        found[f"torchrun/ours, {what}"] = [theirs / ours]
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with nbe.Cluster(f"localhost:{N}", min=1, max=N, cooldown=(0, 0)) as cluster:
        job = cluster.run(sharded_programs.record, sys.argv[1], 10**9)
        try:
            job.wait()
        finally:
            job.stop()
            job.wait(timeout=20)


if __name__ == "__main__":
    main()
