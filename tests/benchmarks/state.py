"""The cost of the state with 25 M parameters: `python -m tests.benchmarks.state [--json FILE] [--only CASE …] [--quick]`.

Four gloo workers train with SGD and momentum (200 MB of state per rank). Lower bounds and other systems are measured
in the same run, alternating with nbelastic. Times are in milliseconds, unless the name says otherwise.
"""

from __future__ import annotations

import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path

import nbelastic as nbe
from tests.benchmarks import programs, recovery, state_programs

N = 4
Figures = dict[str, list[float]]


def every_step(rounds: int) -> Figures:
    """Measure steps with and without a commit after each, alternating."""
    found: Figures = {"step": [], "commit": [], "step without": [], "MB": [], "MB without": []}
    for _ in range(3):
        for every, name in ((0, " without"), (1, "")):
            with nbe.Cluster(f"localhost:{N}", min=N) as cluster:  # a new cluster, because memory is measured
                ranks = cluster.run(state_programs.commits, rounds, every).result(timeout=300)
            found[f"step{name}"] += ranks[0]["step"][3:]
            found[f"MB{name}"] += [rank["MB"] for rank in ranks]
            found["commit"] += ranks[0]["commit"][3:]
    return found | {"commit, % of 100 ms": found["commit"]} | {"MB, ratio": _ratio(found["MB"], found["MB without"])}


def every_tenth(rounds: int) -> Figures:
    """Measure a commit every ten steps, which copies 200 MB, and a bare copy of the same bytes after each."""
    with nbe.Cluster(f"localhost:{N}", min=N) as cluster:
        rank = cluster.run(state_programs.commits, rounds, 10).result(timeout=600)[0]
    commit, bare = rank["commit"][2:], rank["memcpy"][2:]  # the first ones allocate memory
    return {"commit": commit, "memcpy": bare, "bandwidth, ratio": [b / c for b, c in zip(bare, commit, strict=True)]}


def hashes(rounds: int) -> Figures:
    """Measure commits with and without a hash of the replica, in turn, for states of 1, 10 and 100 MB."""
    found: Figures = {}
    for size in (1, 10, 100):
        with nbe.Cluster("localhost:2", min=2) as cluster:
            rank = cluster.run(state_programs.hashed_commits, size, rounds).result(timeout=300)[0]
        with_hash, without = rank["hashed"][5:], rank["not hashed"][5:]  # the first ones plan what to read
        cost = statistics.median(with_hash) - statistics.median(without)
        found |= {f"{size} MB": with_hash, f"{size} MB, without": without, f"{size} MB, % of 100 ms": [cost]}
    return found


def gpu(rounds: int) -> Figures:
    """Measure the copy of 200 MB from a GPU, and a bare copy of the same bytes into pinned memory."""
    if not Path("/dev/nvidia0").exists():
        print("gpu          skipped: there is none here", flush=True)
        return {}
    with nbe.Cluster("localhost:1", min=1) as cluster:
        found: Figures = cluster.run(state_programs.gpu_commits, rounds).result(timeout=300)[0]
    found = {name: values[2:] for name, values in found.items()}
    return found | {"bandwidth, ratio": _ratio(found["bare"], found["copied"])}


def words(seconds: float) -> Figures:
    """Measure commits of a counter in microseconds, with and without a reconfiguration under way."""
    with nbe.Cluster(f"localhost:{N}", min=1, cooldown=(0, 0)) as cluster:
        cluster.wait(N, timeout=60)
        quiet = cluster.run(state_programs.words, seconds).result(timeout=60)[0]
        return {"commit, us": quiet["commit"], "news, us": quiet["news"]}


def sync(rounds: int) -> Figures:
    """Measure the transfer of the state to all other ranks and to one, against the same bytes bare."""
    with nbe.Cluster(f"localhost:{N}", min=N) as cluster:
        found: Figures = cluster.run(state_programs.sync, rounds).result(timeout=300)[0]
    for name in ("all", "one"):
        found[f"{name}, ratio"] = [b / o for b, o in zip(found[f"bare {name}"], found[name], strict=True)]
    return found


def kill(count: int) -> Figures:
    """Measure SIGKILL to the next step, and its lower bound: a bare group and a step of three ranks that are ready."""
    with nbe.Cluster(f"localhost:{N - 1}", min=N - 1) as cluster:
        bare = cluster.run(state_programs.floor, 10).result(timeout=300)[0]
    found = recovery.faults(signal.SIGKILL, count, 3.0, programs.record_large_steps)
    after = [seconds * 1000 for seconds in found["next"]]
    floor = statistics.median(bare)
    return {"next": after, "floor": bare, "ratio": [ms / floor for ms in after], "lost": found["lost"]}


def planned(count: int) -> Figures:
    """Add and remove a worker, from 3 to 4 and back; measure the longest of three gaps between steps at each.

    Four workers on two cores take longer per step than three: undisturbed steps are those of four.
    """
    with recovery.training(f"localhost:{N - 1}", programs.record_large_steps, min=1) as (cluster, folder):
        cluster.wait(N - 1, timeout=60)
        time.sleep(5)
        for _ in range(count):
            cluster.add_host("127.0.0.2:1")
            cluster.wait(N, timeout=60)
            time.sleep(5)
            cluster.remove_host("127.0.0.2")
            cluster.wait(N - 1, timeout=60)
            time.sleep(5)
        steps = recovery.steps_in(folder)
    firsts: dict[int, recovery.Step] = {}
    for step in steps:
        firsts.setdefault(step["step"], step)
    ordered = [firsts[number] for number in sorted(firsts)]
    gaps = [(b["t"] - a["t"]) * 1000 for a, b in pairwise(ordered)]
    worlds = [(a["world"], b["world"]) for a, b in pairwise(ordered)]
    usual = statistics.median(gap for gap, world in zip(gaps, worlds, strict=True) if world == (N, N))
    found: Figures = {"step of four": [usual]}
    for name, change in (("add", (N - 1, N)), ("remove", (N, N - 1))):
        found[name] = [max(gaps[i : i + 3]) for i, world in enumerate(worlds) if world == change]
        found[f"{name}, steps"] = [gap / usual for gap in found[name]]
    found["lost"] = [float(max(firsts) - min(firsts) + 1 - len(firsts))]
    return found


def _ratio(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def cases(part: int) -> recovery.Cases:
    return {
        "every step": lambda: every_step(max(6, 20 // part)),
        "every tenth": lambda: every_tenth(max(4, 12 // part)),
        "hashes": lambda: hashes(max(20, 200 // part)),
        "gpu": lambda: gpu(max(6, 30 // part)),
        "words": lambda: words(10.0 / part),
        "sync": lambda: sync(max(4, 20 // part)),
        "kill": lambda: kill(max(3, 20 // part)),
        "planned": lambda: planned(max(2, 10 // part)),
    }


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
