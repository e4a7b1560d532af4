"""How fast nbelastic starts, recovers and changes size: `python -m tests.benchmarks.recovery [--json FILE] [--quick]`.

Each case prints min / median / max. Times come from files to which the training processes write one line per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

import nbelastic as nbe
from tests.benchmarks import programs
from tests.process.training import lines_in as steps_in
from tests.support.nccl_double import CLUSTERS
from tests.support.processes import driver_pid

Step = dict[str, Any]
Steps = list[Step]
Cases = dict[str, Callable[[], dict[str, list[float]]]]
N = 4


@contextmanager
def training(
    hosts: str, program: Callable[[str, int], int] = programs.record_steps, **options: Any
) -> Iterator[tuple[nbe.Cluster, str]]:
    """Train until the end of the context, on these hosts; yield the cluster and the folder of its step files."""
    with tempfile.TemporaryDirectory() as folder, nbe.Cluster(hosts, cooldown=(0, 0), **options) as cluster:
        job = cluster.run(program, folder, 10**9)
        yield cluster, folder
        job.stop()
        job.wait(timeout=20)


def on_double(abort: float) -> dict[str, Any]:
    """The options of a cluster on the tests' double of NCCL, whose aborts take this many seconds."""
    options = CLUSTERS["nccl"]
    return {**options, "env": {**options["env"], "NCCL_DOUBLE_ABORT_TIME": str(abort)}}


def start_once() -> float:
    """Return the seconds from start() in a fresh process to the first completed step."""
    code = (
        "import time, tempfile, json, sys\n"
        "from pathlib import Path\n"
        "import nbelastic as nbe\n"
        "from tests.benchmarks import programs, recovery\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    began = time.time()\n"
        f"    with nbe.Cluster('localhost:{N}', min={N}, cooldown=(0, 0)).start() as cluster:\n"
        "        cluster.run(programs.record_steps, folder, 3).result(timeout=60)\n"
        "        print(recovery.steps_in(folder)[0]['t'] - began)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[-1])


def faults(
    sig: signal.Signals,
    count: int,
    pause: float,
    program: Callable[[str, int], int] = programs.record_steps,
    size: int = N,
    **options: Any,
) -> dict[str, list[float]]:
    """Signal random ranks of a world of `size`, one after the other; return times to the next step and to full size."""
    found: dict[str, list[float]] = {"next": [], "full": [], "lost": []}
    victims = []
    with training(f"localhost:{size}", program, min=1, max=size, **options) as (cluster, folder):
        for number in range(count):
            cluster.wait(size, timeout=30)
            time.sleep(pause)
            by_rank = sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank or 0)
            victim = by_rank[0] if number % 4 == 0 else random.choice(by_rank)
            victims.append((time.time(), victim.pid))
            os.kill(victim.pid, sig)
            wait_until(lambda pid=victim.pid: all(w.pid != pid for w in cluster.workers))
        cluster.wait(size, timeout=30)
        time.sleep(pause)
        steps = steps_in(folder)
    for at, pid in victims:
        before = max(step["step"] for step in steps if step["t"] <= at)
        after = next(step for step in steps if step["t"] > at and step["pid"] != pid and step["world"] < size)
        again = next(step for step in steps if step["t"] > after["t"] and step["world"] == size)
        found["next"].append(after["t"] - at)
        found["full"].append(again["t"] - at)
        found["lost"].append(max(0.0, before - (after["step"] - 1)))
    return found


def cells(count: int) -> dict[str, list[float]]:
    """Run cells at commits of a world of N, steps of 20 ms: from the request to the output, and the longest step with one."""
    found: dict[str, list[float]] = {"output": [], "longest step": [], "undisturbed": [], "lost": []}
    spans = []
    with training(f"localhost:{N}", programs.record_slow_steps, min=N) as (cluster, folder):
        cluster.wait(N, timeout=30)
        time.sleep(1)
        for _ in range(count):
            times = [time.time()]
            time.sleep(0.3)
            times.append(time.time())
            cluster.execute("print(state.step)", at_commit=True)
            found["output"].append(time.time() - times[-1])
            time.sleep(0.1)
            spans.append([*times, time.time()])
        time.sleep(0.5)
        steps = steps_in(folder)
    for idle, asked, end in spans:
        found["longest step"].append(longest_gap(steps, asked, end))
        found["undisturbed"].append(longest_gap(steps, idle, asked))
    numbers = sorted(step["step"] for step in steps if step["pid"] == steps[0]["pid"])
    found["lost"].append(float(numbers[-1] - numbers[0] + 1 - len(numbers)))
    return found


def swap(count: int) -> dict[str, list[float]]:
    """Replace the program of a world of N, steps of 20 ms, by one that works and by one that fails in its first step.

    `works`, `fails`: from the request to the answer. `gap`: the longest time between two steps meanwhile.
    """
    found: dict[str, list[float]] = {
        "works": [],
        "gap": [],
        "fails": [],
        "gap of a failure": [],
        "lost or repeated": [],
    }
    spans = []
    with training(f"localhost:{N}", programs.record_slow_steps, min=N) as (cluster, folder):
        for _ in range(count):
            for program, took in ((programs.record_slow_steps, "works"), (programs.fail_in_first_step, "fails")):
                cluster.wait(N, timeout=30)
                time.sleep(0.3)
                asked = time.time()
                with contextlib.suppress(nbe.JobError):
                    cluster.run(program, folder, 10**9, swap=True)
                found[took].append(time.time() - asked)
                time.sleep(0.3)
                spans.append((took, asked, time.time()))
        steps = steps_in(folder)
    for took, asked, end in spans:
        found["gap" if took == "works" else "gap of a failure"].append(longest_gap(steps, asked, end))
    numbers = sorted(step["step"] for step in steps if step["pid"] == steps[0]["pid"])
    wrong = len(numbers) - len({*numbers}) + numbers[-1] - numbers[0] + 1 - len({*numbers})
    found["lost or repeated"].append(float(wrong))
    return found


def wait_until(true: Callable[[], bool], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)


def longest_gap(steps: Steps, since: float, until: float) -> float:
    """Return the longest time from `since` to `until` between two steps, each completed by any rank."""
    first: dict[int, float] = {}
    for step in steps:
        if since <= step["t"] <= until:
            first.setdefault(step["step"], step["t"])
    times = sorted(first.values())
    return max(b - a for a, b in pairwise(times))


def announce_end(cluster: nbe.Cluster, host: str) -> None:
    """SIGTERM to the host's agent, as 2 s before its machine ends; then the machine ends: SIGKILL to the agent."""
    worker = next(w for w in cluster.workers if w.host == host)
    agent = psutil.Process(worker.pid).parent().parent()
    agent.terminate()
    gone, _ = psutil.wait_procs([agent], 2)
    if not gone:
        agent.kill()


def planned(
    count: int, remove_host: Callable[[nbe.Cluster, str], object] = nbe.Cluster.remove_host
) -> dict[str, list[float]]:
    """Add a host of one slot and remove it, while N - 1 workers train; return the longest times between two steps.

    `starting` lasts while the new host's template imports torch, on this same machine, where it takes CPU from the
    training. `add` begins when the newcomer is ready.
    """
    found: dict[str, list[float]] = {"add": [], "remove": [], "starting": [], "undisturbed": []}
    spans = []
    with training(f"localhost:{N - 1}", min=1) as (cluster, folder):
        cluster.wait(N - 1, timeout=30)
        time.sleep(1)
        for _ in range(count):
            times = [time.time()]
            time.sleep(0.7)
            times.append(time.time())
            cluster.add_host("127.0.0.2:1")
            cluster.wait(N, timeout=30)
            time.sleep(0.5)
            times.append(time.time())
            remove_host(cluster, "127.0.0.2")
            cluster.wait(N - 1, timeout=30)
            time.sleep(0.5)
            spans.append([*times, time.time()])
            wait_until(lambda: len(cluster.hosts) == 1)
        steps = steps_in(folder)
        ready = [event.time for event in cluster.events if event.kind == "change-planned"]
        failures = sum(event.kind in ("world-broken", "host-lost", "worker-lost") for event in cluster.events)
    for begin, add, remove, end in spans:
        change = next(at for at in ready if at > add) - 0.001
        found["undisturbed"].append(longest_gap(steps, begin, add))
        found["starting"].append(longest_gap(steps, add, change))
        found["add"].append(longest_gap(steps, change, remove))
        found["remove"].append(longest_gap(steps, remove, end))
    numbers = sorted({step["step"] for step in steps})
    found["lost"] = [float(numbers[-1] - numbers[0] + 1 - len(numbers))]
    found["failures"] = [float(failures)]
    return found


def memory() -> dict[str, list[float]]:
    """Return the private memory of each forked worker before the user's code, in MB."""
    with nbe.Cluster(f"localhost:{N}", min=N) as cluster:
        time.sleep(1)
        return {"private": [psutil.Process(w.pid).memory_full_info().uss / 1e6 for w in cluster.workers]}


def throughput(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return steps per second with a commit every step and in plain DDP, alternating on the same workers."""
    found: dict[str, list[float]] = {"commit": [], "plain": [], "ratio": []}
    with nbe.Cluster(f"localhost:{N}", min=N) as cluster:
        for _ in range(rounds):
            plain = cluster.run(programs.count_plain_steps, seconds).result(timeout=120)[0]
            ours = cluster.run(programs.count_steps, seconds).result(timeout=120)[0]
            found["plain"].append(plain)
            found["commit"].append(ours)
            found["ratio"].append(ours / plain)
    return found


def soak(count: int) -> dict[str, list[float]]:
    """Kill one worker per second; return sockets, threads and memory of driver and oldest survivor."""
    seen: dict[str, list[float]] = {}

    def measure(cluster: nbe.Cluster) -> None:
        oldest = psutil.Process(min(cluster.workers, key=lambda w: w.rank or 0).pid)
        for name, process in (("driver", psutil.Process(driver_pid(cluster))), ("survivor", oldest)):
            seen.setdefault(f"{name} sockets", []).append(len(process.net_connections("inet")))
            seen.setdefault(f"{name} files", []).append(process.num_fds())
            seen.setdefault(f"{name} threads", []).append(process.num_threads())
            seen.setdefault(f"{name} MB", []).append(process.memory_info().rss / 1e6)

    with training(f"localhost:{N}", min=1, max=N) as (cluster, folder):
        cluster.wait(N, timeout=30)
        time.sleep(3)
        measure(cluster)
        for number in range(count):
            cluster.wait(N, timeout=30)
            by_rank = sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank or 0)
            os.kill(random.choice(by_rank[1:]).pid, signal.SIGKILL)  # rank 0 stays, to be measured
            time.sleep(1)
            if number % 20 == 19:
                cluster.wait(N, timeout=30)
                measure(cluster)
        numbers = sorted({step["step"] for step in steps_in(folder)})
        seen["steps lost"] = [float(numbers[-1] - numbers[0] + 1 - len(numbers))]
    return seen


def show(case: str, found: dict[str, list[float]]) -> None:
    for name, values in found.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(
            f"{case:12} {name:18} min {low:9.3f}   median {middle:9.3f}   max {high:9.3f}   n={len(values)}", flush=True
        )


def run(doc: str | None, part: int, cases: Callable[[int], Cases]) -> None:
    """Run the command line: `cases(1)` has all rounds, `cases(part)` fewer, for --quick; a case may find nothing."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--quick", action="store_true", help=f"1/{part} of the rounds")
    parser.add_argument("--only", nargs="*", default=[], help="only these cases")
    options = parser.parse_args()
    results = {}
    for name, case in cases(part if options.quick else 1).items():
        if not options.only or name in options.only:
            found = case()
            if found:
                results[name] = found
                show(name, found)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def cases(part: int) -> Cases:
    return {
        "start": lambda: {"first step": [start_once() for _ in range(max(2, 7 // part))]},
        "kill": lambda: faults(signal.SIGKILL, max(5, 50 // part), 0.7),
        "kill-nccl": lambda: faults(signal.SIGKILL, max(5, 50 // part), 0.7, **on_double(abort=0.05)),
        "kill-nccl-1ms": lambda: faults(signal.SIGKILL, max(5, 50 // part), 0.7, **on_double(abort=0.001)),
        "stop": lambda: faults(signal.SIGSTOP, max(3, 20 // part), 0.7),
        "planned": lambda: planned(max(3, 15 // part)),
        "announced": lambda: planned(max(5, 50 // part), announce_end),
        "cells": lambda: cells(max(5, 50 // part)),
        "swap": lambda: swap(max(3, 25 // part)),
        "memory": memory,
        "throughput": lambda: throughput(max(2, 7 // part), 5.0),
        "soak": lambda: soak(max(10, 100 // part)),
    }


if __name__ == "__main__":
    run(__doc__, 10, cases)
