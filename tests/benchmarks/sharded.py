"""Sharded models that lose a rank: `python -m tests.benchmarks.sharded [--json FILE] [--only CASE …] [--quick]`.

Four gloo workers train 25 M parameters in 24 layers with FSDP2 and AdamW: 302 MB of state in all. Lower bounds and other
systems are measured in the same run, in turn with nbelastic. Times are in seconds, unless the name says otherwise.

- `kill`: from SIGKILL of a random rank to the first step of the world of three, by phase, and the same without nbelastic:
  a bare group, `fully_shard`, the bytes that must move, and a step. `lost` counts steps that are done again.
- `planned`: a worker is added, and removed. `gap` is the longest time between two steps around it.
- `steady`: the same training with and without copies, in turn on the same workers. CPU is of all ranks, per step.
- `reshard`: the moves from four ranks to three alone, against bare isend and irecv of the same bytes.
- `peers`: the same kill under torchrun with a DCP checkpoint every 20 steps; see `sharded_peers`.

Each case has the machine's load average, because other programs take time from the same cores.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

import nbelastic as nbe
from tests.benchmarks import recovery, sharded_floor, sharded_peers, sharded_programs

N = 4
PATIENCE = 60.0
PHASES = ("detect and abort", "form and sync", "fully_shard", "bind", "first step")
ENDS = ("left", "called", "sharded", "bound", "step")  # what the ranks mark when they have done a phase
Figures = dict[str, list[float]]
Lines = list[dict[str, Any]]


def steps_of(lines: Lines) -> Lines:
    return [line for line in lines if line["what"] == "step"]


def wait_for_steps(folder: str, world: int, since: float, count: int = 3) -> None:
    """Wait until a world of this size has made some steps after `since`."""

    def made() -> bool:
        steps = [line for line in steps_of(recovery.steps_in(folder)) if line["t"] > since and line["world"] == world]
        newest = max((line["generation"] for line in steps), default=0)
        return len({line["step"] for line in steps if line["generation"] == newest}) >= count

    recovery.wait_until(made, PATIENCE)


def lost(lines: Lines, after: dict[str, Any]) -> float:
    """Count the steps that were made before the step `after`, the first of its world, and are made again."""
    reached = max(line["step"] for line in steps_of(lines) if line["t"] < after["t"])
    return float(max(0, reached - (after["step"] - 1)))


def first_of(lines: Lines, world: int, since: float, until: float = float("inf")) -> dict[str, Any]:
    return next(line for line in steps_of(lines) if since < line["t"] <= until and line["world"] == world)


def kill(rounds: int, count: int) -> Figures:
    """In each round, kill some ranks of a fresh cluster, and measure the floor in processes that live already."""
    found: Figures = {"next": [], "lost": [], **{phase: [] for phase in PHASES}}
    bare: Figures = {}
    found["load average"] = []
    for _ in range(rounds):
        for name, values in kills(count).items():
            found[name] += values
        found["load average"].append(os.getloadavg()[0])
        for name, values in floor(count).items():
            bare.setdefault(name, []).extend(values)
        found["load average"].append(os.getloadavg()[0])
    found |= {f"floor, {name}": values for name, values in bare.items()}
    middle = statistics.median(bare["next"])
    without = middle - statistics.median(bare["first step"])
    found["ratio"] = [value / middle for value in found["next"]]
    found["ratio, no step"] = [
        (value - step) / without for value, step in zip(found["next"], found["first step"], strict=True)
    ]
    return found


def kills(count: int) -> Figures:
    """Kill one rank after another, each in a world of four that has made some steps."""
    with recovery.training(f"localhost:{N}", sharded_programs.record, min=1, max=N) as (cluster, folder):
        victims = []
        for number in range(count):
            wait_for_steps(folder, N, victims[-1][0] if victims else 0.0)
            time.sleep(random.random())  # at any moment of a step
            by_rank = sorted((w for w in cluster.workers if w.rank is not None), key=lambda w: w.rank or 0)
            victim = by_rank[number] if number < N else random.choice(by_rank)
            victims.append((time.time(), victim.pid))
            os.kill(victim.pid, signal.SIGKILL)
            wait_for_steps(folder, N - 1, victims[-1][0], 1)
        lines = recovery.steps_in(folder)
    found: Figures = {"next": [], "lost": [], **{phase: [] for phase in PHASES}}
    for at, _ in victims:
        after = first_of(lines, N - 1, at)
        found["next"].append(after["t"] - at)
        found["lost"].append(lost(lines, after))
        parts = parts_of([line for line in lines if at < line["t"] <= after["t"]], after)
        for phase, begin, end in zip(PHASES, [at, *parts], parts, strict=False):
            found[phase].append(end - begin)
    return found


def parts_of(lines: Lines, after: dict[str, Any]) -> list[float]:
    """Return when the slowest rank had ended each phase of a recovery; the last ends with the first step, `after`."""
    ends = []
    for what in ENDS[:-1]:
        new = [line["t"] for line in lines if line["what"] == what and line["generation"] == after["generation"]]
        old = [line["t"] for line in lines if line["what"] == what and line["generation"] != after["generation"]]
        ends.append(max(old if what == "left" else new))
    return [*ends, after["t"]]


def floor(rounds: int) -> Figures:
    """The phases of the bare recovery, of the slowest rank; `next` is all of them."""
    found: Figures = {}
    for marks in sharded_floor.measure(sharded_floor.Floor, rounds):
        by_name = {name: [dict(rank)[name] for rank in marks] for name, _ in marks[0]}
        begun = max(by_name["begun"])
        ends = {name: max(times) for name, times in by_name.items()} | {"first step": min(by_name["first step"])}
        for before, name in pairwise(("begun", "group", "fully_shard", "moves", "first step")):
            found.setdefault(name, []).append(ends[name] - ends[before])
        found.setdefault("next", []).append(ends["first step"] - begun)
    return found


def planned(count: int) -> Figures:
    """Add a worker and remove it, again and again; count the steps that are lost, and the longest gap between steps."""
    with recovery.training(f"localhost:{N - 1}", sharded_programs.record, min=1) as (cluster, folder):
        spans = []
        wait_for_steps(folder, N - 1, 0.0)
        for _ in range(count):
            begun = time.time()
            cluster.add_host("127.0.0.2:1")
            wait_for_steps(folder, N, begun)
            added = time.time()
            cluster.remove_host("127.0.0.2")
            wait_for_steps(folder, N - 1, added)
            spans.append((begun, added, time.time()))
            recovery.wait_until(lambda: len(cluster.hosts) == 1)
        lines = recovery.steps_in(folder)
    found: Figures = {f"{name}, {what}": [] for name in ("add", "remove") for what in ("lost", "gap")}
    undisturbed = []
    for begun, added, ended in spans:
        for name, begin, end, world in (("add", begun, added, N), ("remove", added, ended, N - 1)):
            after = first_of(lines, world, begin, end)
            found[f"{name}, lost"].append(lost(lines, after))
            times = first_times([line for line in lines if begin <= line["t"] <= end])
            gaps = [b - a for a, b in pairwise(times)]
            at = times.index(after["t"])
            found[f"{name}, gap"].append(max(gaps[max(0, at - 1) : at + 1]))
            undisturbed += gaps[at + 1 :]
    return found | {"undisturbed": undisturbed, "load average": [os.getloadavg()[0]]}


def first_times(lines: Lines) -> list[float]:
    """Return when each step was first made by any rank."""
    first: dict[int, float] = {}
    for line in steps_of(lines):
        first.setdefault(line["step"], line["t"])
    return sorted(first.values())


def steady(rounds: int, batch: int, steps: int, every: int = 4) -> Figures:
    """Train with copies and without, in turn, on the same workers."""
    names = ("step, copies", "step, none", "CPU, copies", "CPU, none", "commit that copies", "other commit")
    found: Figures = {name: [] for name in (*names, "steps/s, ratio", "CPU, ratio", "memory/shard", "load average")}
    with nbe.Cluster(f"localhost:{N}", min=N) as cluster:
        for _ in range(rounds):
            rates, used = {}, {}
            for copies, name in ((1, "copies"), (0, "none")):
                job = cluster.run(sharded_programs.steady, copies, every, batch, steps)
                ranks = job.result(timeout=600)
                rates[copies] = steps / sum(ranks[0]["step"])
                used[copies] = sum(rank["CPU"] for rank in ranks)
                found[f"step, {name}"] += ranks[0]["step"]
                found[f"CPU, {name}"].append(used[copies])
                if copies:
                    found["commit that copies"] += ranks[0]["commit"][every - 1 :: every]
                    found["memory/shard"] += [rank["arenas"] / rank["shard"] for rank in ranks]
                    found["other commit"] += [c for n, c in enumerate(ranks[0]["commit"], 1) if n % every]
            found["steps/s, ratio"].append(rates[1] / rates[0])
            found["CPU, ratio"].append(used[1] / used[0])
            found["load average"].append(os.getloadavg()[0])
    return found


def reshard(rounds: int) -> Figures:
    """Move the parameters, and parameters with AdamW's tensors, from four ranks to three, bare and by nbelastic."""
    found: Figures = {}
    for marks in sharded_floor.measure(sharded_floor.Resharding, rounds):
        ends = {name: max(dict(rank)[name] for rank in marks) for name, _ in marks[0]}
        for what in ("parameters", "with AdamW"):
            took = {way: ends[f"{what}, {way}"] - ends[f"{what}, {way}, begun"] for way in ("ours", "bare")}
            for way, seconds in took.items():
                found.setdefault(f"{what}, {way}", []).append(seconds)
            found.setdefault(f"{what}, ratio", []).append(took["ours"] / took["bare"])
    return found | {"load average": [os.getloadavg()[0]]}


def cases(part: int) -> recovery.Cases:
    return {
        "kill": lambda: kill(max(1, 3 // part), max(4, 6 // part)),
        "planned": lambda: planned(max(2, 6 // part)),
        "steady": lambda: steady(max(3, 8 // part), 8, 12),
        "steady, large": lambda: steady(max(2, 6 // part), 512, 8),
        "reshard": lambda: reshard(max(10, 40 // part)),
        "peers": lambda: sharded_peers.compare(max(1, 3 // part), max(2, 4 // part)),
    }


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
