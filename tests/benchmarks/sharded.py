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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks import recovery, sharded_floor, sharded_peers, sharded_programs
from tests.benchmarks.bare import processes

N = 4
PATIENCE = 120.0
PHASES = ("detect and abort", "form and sync", "fully_shard", "bind", "first step")
Figures = dict[str, list[float]]
Lines = list[dict[str, Any]]


def steps_of(lines: Lines) -> Lines:
    return [line for line in lines if line["what"] == "step"]


def wait_for_steps(cluster: nbe.Cluster, folder: str, world: int, since: float, count: int = 3) -> int:
    """Wait until a world of this size (0: any) has made some steps after `since`; return its generation."""
    found: dict[int, set[int]] = {}

    def made() -> bool:
        found.clear()
        for line in steps_of(recovery.steps_in(folder)):
            if line["t"] > since and line["world"] in (world, world or line["world"]):
                found.setdefault(line["generation"], set()).add(line["step"])
        return len(found.get(max(found, default=0), ())) >= count

    try:
        recovery.wait_until(made, PATIENCE)
    except TimeoutError:
        print(*(event.text for event in cluster.events[-20:]), sep="\n")
        raise
    return max(found)


def lost(lines: Lines, after: dict[str, Any]) -> float:
    """Count the steps that were made before the step `after`, the first of its world, and are made again."""
    reached = max(line["step"] for line in steps_of(lines) if line["t"] < after["t"])
    return float(max(0, reached - (after["step"] - 1)))


def first_of(lines: Lines, generation: int) -> dict[str, Any]:
    """The first step of a generation after this one."""
    return next(line for line in steps_of(lines) if line["generation"] > generation)


def kill(count: int) -> Figures:
    """Kill one rank after another, each in a world of four that has made some steps; before each, measure the floor."""
    names = ("next", "lost", "ratio", "ratio, no step", "load average")
    found: Figures = {name: [] for name in (*names, *PHASES)}
    with (
        processes(sharded_floor.Floor, sharded_floor.NEW) as bare,
        recovery.training(f"localhost:{N}", sharded_programs.record, min=1, max=N) as (cluster, folder),
    ):
        at = 0.0
        for number in range(count):
            wait_for_steps(cluster, folder, N, at)
            with standing_still(folder):
                without = floor(bare())
            at, after, lines = kill_one(cluster, folder, number % N)
            parts = [at, *parts_of([line for line in lines if line["t"] > at], after)]
            took = {phase: end - begin for phase, (begin, end) in zip(PHASES, pairwise(parts), strict=True)}
            whole = after["t"] - at
            took |= {"next": whole, "lost": lost(lines, after), "ratio": whole / without["next"]}
            took["ratio, no step"] = (whole - took["first step"]) / (without["next"] - without["first step"])
            took["load average"] = os.getloadavg()[0]
            for name, value in (took | {f"floor, {name}": value for name, value in without.items()}).items():
                found.setdefault(name, []).append(value)
    return found


@contextmanager
def standing_still(folder: str) -> Iterator[None]:
    """The training waits until the end of the context, and has made some steps again when this returns."""
    pause = Path(folder) / "pause"
    pause.touch()
    time.sleep(1)  # the step that is under way
    yield
    pause.unlink()
    reached = max(line["step"] for line in steps_of(recovery.steps_in(folder)))
    recovery.wait_until(lambda: any(line["step"] > reached + 1 for line in recovery.steps_in(folder) if "step" in line))


def kill_one(cluster: nbe.Cluster, folder: str, rank: int) -> tuple[float, dict[str, Any], Lines]:
    """Kill a rank at any moment of a step; return when, the first step after it, and the lines up to then."""
    generation = cluster.status().generation
    time.sleep(random.random())
    victim = next(w for w in cluster.workers if w.rank == rank)
    at = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    recovery.wait_until(lambda: is_after(folder, generation), PATIENCE)
    lines = recovery.steps_in(folder)
    after = first_of(lines, generation)
    return at, after, [line for line in lines if line["t"] <= after["t"]]


def is_after(folder: str, generation: int) -> bool:
    return any(line["generation"] > generation for line in steps_of(recovery.steps_in(folder)))


def parts_of(lines: Lines, after: dict[str, Any]) -> list[float]:
    """Return when the slowest rank had ended each phase of a recovery; the last ends with the first step, `after`."""
    new = after["generation"]
    left = [line["t"] for line in lines if line["what"] == "left" and line["generation"] < new]
    ends = [max(left)]
    for what in ("called", "sharded", "bound"):
        ends.append(max(line["t"] for line in lines if line["what"] == what and line["generation"] == new))
    return [*ends, after["t"]]


def floor(marks: list[dict[str, float]]) -> dict[str, float]:
    """The seconds of each phase of a bare recovery, up to the slowest rank; `next` is all of them."""
    ends = {name: max(rank[name] for rank in marks) for name in marks[0]}
    ends["first step"] = min(rank["first step"] for rank in marks)  # as the first line of a step counts elsewhere
    names = ("begun", "group", "fully_shard", "moves", "first step")
    found = {name: ends[name] - ends[before] for before, name in pairwise(names)}
    return found | {"next": ends["first step"] - ends["begun"]}


def planned(count: int) -> Figures:
    """Add a worker and remove it, again and again; count the steps that are lost, and the longest gap between steps."""
    with recovery.training(f"localhost:{N - 1}", sharded_programs.record, min=1) as (cluster, folder):
        spans = []
        generation = wait_for_steps(cluster, folder, N - 1, 0.0)
        for _ in range(count):
            begun, before = time.time(), generation
            cluster.add_host("127.0.0.2:1")
            grown = wait_for_steps(cluster, folder, N, begun)
            added = time.time()
            cluster.remove_host("127.0.0.2")
            generation = wait_for_steps(cluster, folder, N - 1, added)
            spans += [("add", begun, added, before), ("remove", added, time.time(), grown)]
            recovery.wait_until(lambda: len(cluster.hosts) == 1)
        lines = recovery.steps_in(folder)
    found: Figures = {f"{name}, {what}": [] for name in ("add", "remove") for what in ("lost", "gap")}
    undisturbed = []
    for name, begin, end, generation in spans:
        after = first_of(lines, generation)
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
    with processes(sharded_floor.Resharding, sharded_floor.NEW) as one_round:
        every = [one_round() for _ in range(rounds)]
    for marks in every:
        ends = {name: max(rank[name] for rank in marks) for name in marks[0]}
        for what in ("parameters", "with AdamW"):
            took = {way: ends[f"{what}, {way}"] - ends[f"{what}, {way}, begun"] for way in ("ours", "bare")}
            for way, seconds in took.items():
                found.setdefault(f"{what}, {way}", []).append(seconds)
            found.setdefault(f"{what}, ratio", []).append(took["ours"] / took["bare"])
    return found | {"load average": [os.getloadavg()[0]]}


def cases(part: int) -> recovery.Cases:
    return {
        "kill": lambda: kill(max(4, 20 // part)),
        "planned": lambda: planned(max(2, 6 // part)),
        "steady": lambda: steady(max(3, 8 // part), 8, 12),
        "steady, large": lambda: steady(max(2, 6 // part), 512, 8),
        "reshard": lambda: reshard(max(10, 40 // part)),
        "peers": lambda: sharded_peers.compare(max(1, 3 // part), max(2, 4 // part)),
    }


if __name__ == "__main__":
    recovery.run(__doc__, 5, cases)
