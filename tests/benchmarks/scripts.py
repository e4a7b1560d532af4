"""Scripts under nbelastic and under torchrun: `python -m tests.benchmarks.scripts [--json FILE] [--quick]`.

Both run the same script with four gloo workers; it saves a checkpoint after each step. One worker is killed again and
again. The same code measures both, from the lines that the script prints.

- `kill: next`: from SIGKILL of a random worker to the first step of a worker that was started afterwards.
- `start`: from the request to the first step. nbelastic's cluster runs already; torchrun's time begins at its command.
- `join`: from the start of a terminal's torchrun, with one worker, to the first step at the new size.
- `alone`: the time to the first step of the same torchrun with its own rendezvous, while the other four train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks.recovery import N, Steps, steps_in
from tests.process.script_training import MANY_STEPS, TRAIN, join_options, torchrun

LOOK = 0.02  # seconds
PAUSE = 0.01  # seconds after each step
PATIENCE = 60.0
ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=1000")
# By default all restarts share one store: gloo ranks find addresses of dead ranks, and torchrun survives no kill.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def found(look: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (answer := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(LOOK)
    return answer


def members(folder: str, world: int = N) -> list[int]:
    """Return the processes that have just made a step together, if there are `world` of them."""
    recent: Steps = [step for step in steps_in(folder) if step["t"] > time.time() - 0.5]
    pids = {step["pid"] for step in recent if step["world"] == world}
    return sorted(pids) if len(pids) == world == len({step["pid"] for step in recent}) else []


def kills(folder: str, count: int) -> list[float]:
    """Return the seconds from each kill to the next step."""
    took = []
    for _ in range(count):
        pids = found(lambda: members(folder), "a world of full size")
        time.sleep(random.random() / 4)
        at, victim = time.time(), random.choice(pids)
        os.kill(victim, signal.SIGKILL)
        before = set(pids)
        fresh = found(
            lambda before=before, at=at: [s for s in steps_in(folder) if s["pid"] not in before and s["t"] > at],
            "a step after a kill",
        )
        took.append(fresh[0]["t"] - at)
    return took


def ours(count: int, joins: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder, nbe.Cluster(f"localhost:{N}", min=1, cooldown=(0, 0)) as cluster:
        cluster.wait(N)
        began = time.time()
        job = cluster.run_script(TRAIN, folder, MANY_STEPS, PAUSE, max_restarts=1000, env={"OMP_NUM_THREADS": "1"})
        start = found(lambda: steps_in(folder), "ours starts")[0]["t"] - began
        values = {"start": [start], "kill: next": kills(folder, count), "join": [], "alone": []}
        for _ in range(joins):
            found(lambda: members(folder), "a world of full size")
            began = time.time()
            with torchrun(
                *join_options(cluster.connection_file()), TRAIN, folder, MANY_STEPS, PAUSE, OMP_NUM_THREADS="1"
            ):
                first = found(
                    lambda began=began: [s for s in steps_in(folder) if s["world"] == N + 1 and s["t"] > began],
                    "a join",
                )
                values["join"].append(first[0]["t"] - began)
            found(lambda: members(folder), "a world of full size")
            values["alone"].append(alone())
        job.stop()
        job.wait(timeout=20)
    return values


def theirs(count: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        began = time.time()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *ALONE,
            f"--nproc-per-node={N}",
            TRAIN,
            folder,
            MANY_STEPS,
            PAUSE,
        ]
        environment = {**os.environ, **OWN_STORE}
        run = stack.enter_context(
            subprocess.Popen(
                [str(part) for part in command],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(run.terminate)
        start = found(lambda: steps_in(folder), "torchrun starts")[0]["t"] - began
        return {"start": [start], "kill: next": kills(folder, count)}


def alone() -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        with torchrun(*ALONE, "--nproc-per-node=1", TRAIN, folder, MANY_STEPS, PAUSE, **OWN_STORE):
            return float(found(lambda: steps_in(folder), "torchrun starts")[0]["t"] - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, count, joins = (1, 3, 1) if options.quick else (3, 8, 2)
    values: dict[str, dict[str, list[float]]] = {"nbelastic": {}, "torchrun": {}}
    for _ in range(rounds):
        for name, got in (("nbelastic", ours(count, joins)), ("torchrun", theirs(count))):
            for what, numbers in got.items():
                values[name].setdefault(what, []).extend(numbers)
    for name, each in values.items():
        for what, numbers in each.items():
            middle = statistics.median(numbers)
            print(f"{name:10} {what:12} {min(numbers):6.2f} / {middle:6.2f} / {max(numbers):6.2f} s   n={len(numbers)}")
    ours_, theirs_ = (statistics.median(values[name]["kill: next"]) for name in ("nbelastic", "torchrun"))
    print(f"torchrun takes {theirs_ / ours_:.1f} times as long after a kill")
    if options.json:
        options.json.write_text(json.dumps(values))


if __name__ == "__main__":
    main()
