"""Sharded training under nbelastic and its peers: `python -m tests.benchmarks.sharded_peers [--torchft PYTHON] [--json FILE]`.

All train the same model, with the same kills, in turn. A round is a fresh start of each system, and then kills at any step
between two checkpoints. `next` is the time from SIGKILL to the first step of a new world,
and `full` to the first such step of four ranks. `lost` counts the steps that are done again. nbelastic copies every commit;
torchrun's script saves a DCP checkpoint every 20 steps; torchft has two replicas of two sharded ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.benchmarks import sharded_programs
from tests.benchmarks.peers import ours
from tests.benchmarks.peers.running import private_network, started
from tests.benchmarks.recovery import show, steps_in

N = 4
PATIENCE = 180.0  # seconds; a system without a next step by then has failed
LOOK = 0.05
SPELL = 20  # steps between two checkpoints; a kill comes at any of them
Steps = list[dict[str, Any]]
T = TypeVar("T")


def commands(torchft: str) -> dict[str, tuple[str, ...]]:
    """The command of each system, without its last argument, the folder. `torchft`: a Python that has it, or nothing."""
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(N), "--max-restarts", "100", "--monitor-interval", "0.1"),
        *("-m", "tests.benchmarks.sharded_torchrun"),
    )
    found = {"nbelastic": (sys.executable, "-m", "tests.benchmarks.sharded_peers", "--train"), "torchrun": torchrun}
    return found | ({"torchft": (torchft, "-m", "tests.benchmarks.sharded_torchft")} if torchft else {})


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
    last = max(step["step"] for step in read(folder)) + random.randrange(SPELL)
    wait_for(lambda: next((True for step in read(folder) if step["step"] >= last), None))
    time.sleep(random.random())
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


def compare(rounds: int, kills: int, torchft: str = "") -> dict[str, list[float]]:
    """Kill ranks of each system, in turn; nothing is measured where a private network cannot be had."""
    if not private_network():
        print("peers: skipped: torchrun listens on every interface, and a private network (unshare, ip) cannot be had")
        return {}
    found: dict[str, list[float]] = {}
    systems = commands(torchft)
    for _ in range(rounds):
        for name, command in systems.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                started([*command, folder], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
            ):
                for _ in range(kills):
                    for what, value in kill_one(folder).items():
                        found.setdefault(f"{name}, {what}", []).append(value)
            found.setdefault("load average", []).append(os.getloadavg()[0])
    for name in list(systems)[1:]:
        for what in ("next", "full"):
            theirs, ours = (statistics.median(found[f"{one}, {what}"]) for one in (name, "nbelastic"))
            found[f"{name}/ours, {what}"] = [theirs / ours]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4, help="of each system in each round")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="a Python that has torchft-nightly")
    parser.add_argument("--train", metavar="FOLDER", help="train with nbelastic until SIGTERM, and measure nothing")
    options = parser.parse_args()
    if options.train:
        ours.train(sharded_programs.record, options.train, N)
        return
    found = compare(options.rounds, options.kills, options.torchft)
    show("peers", found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
